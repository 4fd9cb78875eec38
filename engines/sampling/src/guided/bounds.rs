//! Numbers of a JSON schema that llguidance would change, or overflow on: it reads each as an f64, makes a 64-bit integer of
//! it and negates that, without a check. For [`compile`](super::compile).

use serde_json::{Map, Number, Value};

/// 2^63: every 64-bit integer is smaller.
const BEYOND: f64 = 9_223_372_036_854_775_808.0;
/// The largest f64 below 2^63.
const GREATEST: i64 = 9_223_372_036_854_774_784;
/// The least bound that is negated without an overflow: the number after -2^63 that an f64 holds.
const LEAST: i64 = -GREATEST;
/// The least number of 19 digits. Of those at least as far from zero, llguidance takes only ranges that end.
const NINETEEN_DIGITS: f64 = 1e18;

const LOWER: [&str; 2] = ["minimum", "exclusiveMinimum"];
const UPPER: [&str; 2] = ["maximum", "exclusiveMaximum"];

/// Keywords by which several schemas hold for one value. llguidance makes one of them.
const MEETINGS: [&str; 5] = ["$ref", "allOf", "anyOf", "oneOf", "patternProperties"];

/// Moves bounds to where llguidance takes them.
///
/// # Errors
/// Bounds that leave no number between -2^63 and 2^63, a `multipleOf` of more than 32 bits, several that may hold for one number
/// and have such a common multiple, or an integer of a `const` or `enum` that no f64 holds: llguidance would take another in its
/// place.
pub(super) fn fit(schema: &mut Value) -> Result<(), String> {
    let mut open = vec![(schema, false)];
    let (mut common, mut may_meet): (Option<Step>, bool) = (None, false);
    while let Some((value, is_names)) = open.pop() {
        match value {
            Value::Object(entries) => {
                if !is_names {
                    fit_bounds(entries)?;
                    may_meet |= MEETINGS.iter().any(|key| entries.contains_key(*key));
                }
                for (key, value) in entries {
                    match key.as_str() {
                        _ if is_names => open.push((value, false)),
                        // Values, not schemas.
                        "const" | "enum" => check_values(key, value)?,
                        "multipleOf" => {
                            let step = Step::of(value)?;
                            common = Some(common.map_or(step, |common| common.with(step)));
                        }
                        "default" | "examples" => {}
                        "properties" | "patternProperties" | "$defs" | "definitions" => {
                            open.push((value, true));
                        }
                        _ => open.push((value, false)),
                    }
                }
            }
            Value::Array(items) => open.extend(items.iter_mut().map(|item| (item, false))),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    if may_meet && common.is_some_and(|common| !common.fits()) {
        return Err(
            "the digits of the least common multiple of all 'multipleOf' do not fit 32 bits".into(),
        );
    }
    Ok(())
}

/// Moves the bounds of one schema between -2^63 and 2^63. llguidance itself lowers upper bounds of integers.
fn fit_bounds(entries: &mut Map<String, Value>) -> Result<(), String> {
    let is_a = |name: &str| match entries.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == name),
        Some(kind) => kind == name,
        None => false,
    };
    let is_integer = is_a("integer") && !is_a("number");
    let (mut is_high, mut is_low) = (false, false);
    for key in LOWER {
        let Some((value, bound)) = number(entries, key) else {
            continue;
        };
        // llguidance makes the largest integer of 2^63.
        let is_largest = is_integer && key == "minimum" && value.is_i64();
        if bound >= BEYOND && !is_largest {
            return Err(beyond(key, value));
        }
        if bound <= -BEYOND {
            *value = LEAST.into();
        }
        is_high |= bound >= NINETEEN_DIGITS;
    }
    for key in UPPER {
        let Some((value, bound)) = number(entries, key) else {
            continue;
        };
        if bound <= -BEYOND {
            return Err(beyond(key, value));
        }
        if bound >= BEYOND && !is_integer {
            *value = GREATEST.into();
        }
        is_low |= bound <= -NINETEEN_DIGITS;
    }
    if is_high && UPPER.iter().all(|key| number(entries, key).is_none()) {
        let most = if is_integer { i64::MAX } else { GREATEST };
        entries.entry("maximum").or_insert(most.into());
    }
    if is_low && LOWER.iter().all(|key| number(entries, key).is_none()) {
        entries.entry("minimum").or_insert(LEAST.into());
    }
    Ok(())
}

/// A bound that is a number; in draft 4 `exclusiveMinimum` is true or false.
fn number<'a>(entries: &'a mut Map<String, Value>, key: &str) -> Option<(&'a mut Value, f64)> {
    let value = entries.get_mut(key)?;
    let number = value.as_f64()?;
    Some((value, number))
}

fn beyond(key: &str, value: &Value) -> String {
    format!("'{key}' is {value}, but numbers with bounds lie between -2^63 and 2^63")
}

/// A `multipleOf`, in units of its last decimal place. Both numbers are integers.
#[derive(Clone, Copy)]
struct Step {
    step: f64,
    /// How many of the units are 1.
    one: f64,
}

impl Step {
    /// Reads it as llguidance does.
    fn of(value: &Value) -> Result<Self, String> {
        let (mut step, mut one) = (value.as_f64().unwrap_or_default().abs(), 1.0);
        while step.fract() != 0.0 {
            step *= 10.0;
            one *= 10.0;
        }
        let read = Self { step, one };
        if read.fits() {
            return Ok(read);
        }
        let problem = format!("'multipleOf' is {value}, whose digits");
        Err(if one > 1.0 {
            format!("{problem} as an f64 do not fit 32 bits; those of 0.01, 0.05 and 0.25 do")
        } else {
            format!("{problem} do not fit 32 bits")
        })
    }

    /// llguidance computes the remainder after each digit in 32 bits: ten times the last one, and the digit in units of the
    /// step's last decimal place.
    fn fits(self) -> bool {
        self.step * 10.0 + self.one * 9.0 <= f64::from(u32::MAX)
    }

    /// The least common multiple, or one of them if that does not fit.
    fn with(self, other: Self) -> Self {
        if self.step == 0.0 {
            return other;
        }
        if !self.fits() || other.step == 0.0 {
            return self;
        }
        let one = self.one.max(other.one);
        let (step, other) = (self.step * (one / self.one), other.step * (one / other.one));
        let (mut divisor, mut rest) = (step, other);
        while rest != 0.0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        Self {
            step: step / divisor * other,
            one,
        }
    }
}

fn check_values(keyword: &str, value: &Value) -> Result<(), String> {
    let mut open = vec![value];
    while let Some(value) = open.pop() {
        match value {
            Value::Number(number) => {
                if !is_kept(number) {
                    return Err(format!(
                        "'{keyword}' has {number}, which is no integer that an f64 holds; use a string"
                    ));
                }
            }
            Value::Array(items) => open.extend(items),
            Value::Object(entries) => open.extend(entries.values()),
            Value::Null | Value::Bool(_) | Value::String(_) => {}
        }
    }
    Ok(())
}

/// Whether it stays the same as an f64, which has 53 bits: it is negated as an integer, or, above 63 bits, written with the digits
/// that tell its f64 from others.
fn is_kept(number: &Number) -> bool {
    let Some(integer) = number.as_i64() else {
        let is_same = |float: f64| float.to_string() == number.to_string();
        return !number.is_u64() || number.as_f64().is_some_and(is_same);
    };
    let bits = integer.unsigned_abs();
    let significant = bits.checked_shr(bits.trailing_zeros()).unwrap_or(0);
    significant < 1 << 53 && integer != i64::MIN
}
