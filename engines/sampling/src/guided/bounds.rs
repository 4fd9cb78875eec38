//! Numeric bounds of a JSON schema that 64-bit integers do not hold, or barely. llguidance makes integers of all bounds,
//! and negates them, without a check. For [`compile`](super::compile).

use serde_json::Value;

/// 2^63: every 64-bit integer is smaller.
const BEYOND: f64 = 9_223_372_036_854_775_808.0;
/// The least bound that is negated without an overflow: the number after -2^63 that an f64 holds.
const LEAST: i64 = -9_223_372_036_854_774_784;

/// Raises lower bounds of -2^63 and less to [`LEAST`], which leaves out the last 1024 integers at most that llguidance
/// could express. Upper bounds of 2^63 and more are cut off there by llguidance.
///
/// # Errors
/// A bound that leaves no 64-bit integer: llguidance would take another in its place.
pub(super) fn fit(schema: &mut Value) -> Result<(), String> {
    let mut open = vec![(schema, false)];
    while let Some((value, is_names)) = open.pop() {
        match value {
            Value::Object(entries) => {
                for (key, value) in entries {
                    match key.as_str() {
                        _ if is_names => open.push((value, false)),
                        // Values, not schemas.
                        "const" | "enum" | "default" | "examples" => {}
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
