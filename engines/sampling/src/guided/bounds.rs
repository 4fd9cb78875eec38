//! Numbers of a JSON schema that llguidance would change, or overflow on: it reads each as an f64, makes a 64-bit integer of
//! it and negates that, without a check. For [`compile`](super::compile).

use serde_json::{Number, Value};

/// 2^63: every 64-bit integer is smaller.
const BEYOND: f64 = 9_223_372_036_854_775_808.0;
/// The least bound that is negated without an overflow: the number after -2^63 that an f64 holds.
const LEAST: i64 = -9_223_372_036_854_774_784;

/// Raises lower bounds of -2^63 and less to [`LEAST`]. llguidance itself lowers upper bounds of 2^63 and more.
///
/// # Errors
/// A bound that leaves no 64-bit integer, or an integer of a `const` or `enum` that no f64 holds: llguidance would take
/// another in its place.
pub(super) fn fit(schema: &mut Value) -> Result<(), String> {
    let mut open = vec![(schema, false)];
    while let Some((value, is_names)) = open.pop() {
        match value {
            Value::Object(entries) => {
                for (key, value) in entries {
                    match key.as_str() {
                        _ if is_names => open.push((value, false)),
                        // Values, not schemas.
                        "const" | "enum" => check_values(key, value)?,
                        "default" | "examples" => {}
                        "properties" | "patternProperties" | "$defs" | "definitions" => {
                            open.push((value, true));
                        }
                        "minimum" | "exclusiveMinimum" => {
                            let bound = value.as_f64().unwrap_or_default();
                            check(key, bound < BEYOND)?;
                            if bound <= -BEYOND {
                                *value = LEAST.into();
                            }
                        }
                        "maximum" | "exclusiveMaximum" => {
                            let bound = value.as_f64().unwrap_or_default();
                            check(key, bound > -BEYOND)?;
                        }
                        _ => open.push((value, false)),
                    }
                }
            }
            Value::Array(items) => open.extend(items.iter_mut().map(|item| (item, false))),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    Ok(())
}

fn check(keyword: &str, is_within: bool) -> Result<(), String> {
    if !is_within {
        return Err(format!("'{keyword}' leaves no integer of 64 bits"));
    }
    Ok(())
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
