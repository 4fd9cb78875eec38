//! A character table for the normalizer `Precompiled`, in SentencePiece's format.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// A node of the table's tree: a block of 256 units, the first of which is its value.
const BLOCK: u32 = 256;

/// Returns the normalizer that replaces the first of each pair by the second.
pub(super) fn precompiled(entries: &[(&str, &str)]) -> Value {
    let (mut units, mut texts) = (vec![BLOCK << 10], String::new());
    units.resize(2 * BLOCK as usize, 0);
    for (from, to) in entries {
        let (mut base, mut unit) = (BLOCK, 0);
        for byte in from.bytes() {
            unit = (base ^ u32::from(byte)) as usize;
            if units[unit] == 0 {
                let new = u32::try_from(units.len()).unwrap();
                units[unit] = ((base ^ u32::from(byte) ^ new) << 10) | u32::from(byte);
                units.resize(units.len() + BLOCK as usize, 0);
            }
            base ^= u32::from(byte) ^ (units[unit] >> 10);
        }
        units[unit] |= 1 << 8;
        units[base as usize] = u32::try_from(texts.len()).unwrap() | (1 << 31);
        texts.push_str(to);
        texts.push('\0');
    }
    let bytes = u32::try_from(units.len() * 4).unwrap();
    let mut map = bytes.to_le_bytes().to_vec();
    map.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
    map.extend(texts.bytes());
    json!({ "type": "Precompiled", "precompiled_charsmap": STANDARD.encode(map) })
}
