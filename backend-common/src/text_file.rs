//! [`read_text`]: a text file of limited size.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Reads a text file of at most `most_bytes`. It reads no more than that: the size that the system states is 0 for a pipe, and a
/// file may grow.
///
/// # Errors
/// [`FileTooLarge`](io::ErrorKind::FileTooLarge) if it has more bytes, [`InvalidData`](io::ErrorKind::InvalidData) if it is not
/// UTF-8, and errors of the system.
pub fn read_text(path: &Path, most_bytes: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    let mut limited = File::open(path)?.take(most_bytes.saturating_add(1));
    limited.read_to_end(&mut bytes)?;
    if limited.limit() == 0 {
        let problem = format!("it is larger than {most_bytes} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit_whatever_the_system_says_of_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, "é").unwrap();
        assert_eq!(read_text(&path, 2).unwrap(), "é");
        // The limit is within a character.
        let kind = |path: &Path| read_text(path, 1).unwrap_err().kind();
        assert_eq!(kind(&path), io::ErrorKind::FileTooLarge);
        assert_eq!(kind(Path::new("/dev/zero")), io::ErrorKind::FileTooLarge);
        std::fs::write(&path, b"\xff").unwrap();
        assert_eq!(kind(&path), io::ErrorKind::InvalidData);
    }
}
