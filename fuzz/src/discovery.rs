//! Data from discovery: lease files, and the records in them or in etcd.

use bytes::Bytes;
use genset_runtime::discovery::{Entry, InstanceRecord};

use crate::input::split_at_byte;

/// A lease file.
pub fn lease_file(file: &[u8]) {
    let entries = genset_runtime::fuzzing::lease_entries(file).unwrap_or_default();
    let bytes: usize = entries.iter().map(|entry| entry.value.len()).sum();
    assert!(bytes <= file.len());
}

/// A key, NUL, and a record. The record is skipped, or it belongs to that key and survives a round trip.
pub fn discovery_record(input: &[u8]) {
    let (key, value) = split_at_byte(input, 0);
    let key = String::from_utf8_lossy(key).into_owned();
    let value = Bytes::copy_from_slice(value);
    // Also tries the record's own key, so that the body is reached without guessing the key.
    let own_key = serde_json::from_slice::<InstanceRecord>(&value).map(|record| record.key());
    for key in [Some(key), own_key.ok()].into_iter().flatten() {
        let entry = Entry {
            key,
            value: value.clone(),
        };
        if let Ok(record) = InstanceRecord::try_from_entry(&entry) {
            assert_eq!(record.key(), entry.key);
            let written = record.to_entry().unwrap();
            let again = InstanceRecord::try_from_entry(&written).unwrap();
            assert_eq!(again, record);
        }
    }
}
