//! Batches: the body that creates one, the upload of a file, and the file's lines.

use std::fs;

use bytes::Bytes;
use genset_frontend::batch::{BatchInput, BatchLine};
use genset_frontend::fuzzing::{batch_request, upload};

use crate::input::{cuts, pieces, split_at_byte};
use crate::requests::judged;

/// `/v1/batches`.
pub fn batches(body: &[u8]) {
    judged(batch_request(body));
}

/// `/v1/files`: the content type, a line break and the body. The result does not depend on how the body is cut.
pub fn uploads(input: &[u8]) {
    let (lengths, input) = cuts(input);
    let (content_type, body) = split_at_byte(input, b'\n');
    let taken = |pieces: Vec<&[u8]>| {
        let folder = tempfile::tempdir().expect("temporary folders can be made");
        let pieces = pieces.into_iter().filter(|piece| !piece.is_empty());
        let pieces = pieces.map(Bytes::copy_from_slice).collect();
        let (status, content) = upload(folder.path(), content_type, pieces).unwrap();
        assert!(status == 200 || (400..500).contains(&status), "{status}");
        assert_eq!(content.is_some(), status == 200);
        (status, content)
    };
    assert_eq!(taken(pieces(body, lengths)), taken(vec![body]));
}

/// A file of requests. Each line is the same when it is read again.
pub fn batch_lines(file: &[u8]) {
    let folder = tempfile::tempdir().expect("temporary folders can be made");
    let path = folder.path().join("lines.jsonl");
    fs::write(&path, file).expect("temporary files can be written");
    let mut seen = Vec::new();
    let opened = BatchInput::open([path], |_, line| {
        seen.push(line.to_vec());
        Ok(())
    });
    let mut input = opened.expect("no line is over the limit");
    assert_eq!(input.count(), seen.len());
    for (index, line) in seen.iter().enumerate() {
        let (_, again) = input.read(index).expect("the file is still there");
        assert_eq!(&again, line);
        let Ok(request) = BatchLine::parse(line) else {
            continue;
        };
        if request.check().is_ok() {
            assert!(request.custom_id().is_some());
        }
    }
}
