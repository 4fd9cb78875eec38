//! GGUF files in parts, as `llama-gguf-split` writes them: `NAME-00001-of-00003.gguf` and so on. The first part has the
//! metadata, and each part has tensors.

use std::path::{Path, PathBuf};

use super::header::{Header, HeaderError, Value};
use crate::error::LoadError;
use crate::load::map::MappedFile;

/// Digits of a part's number and of the number of parts.
const DIGITS: usize = 5;

/// Parses the name before `-00001-of-00003.gguf`, the part's number and the number of parts.
pub(crate) fn parse_name(path: &Path) -> Option<(&str, usize, usize)> {
    let name = path.file_name()?.to_str()?;
    let ending = name.get(name.len().checked_sub(".gguf".len())?..)?;
    let stem = name.strip_suffix(ending)?;
    let (front, count) = stem.rsplit_once("-of-")?;
    let (front, number) = front.rsplit_once('-')?;
    let parse = |digits: &str| {
        let is_number = digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| digits.parse::<usize>().ok()).flatten()
    };
    let (number, count) = (parse(number)?, parse(count)?);
    (ending.eq_ignore_ascii_case(".gguf") && (1..=count).contains(&number))
        .then_some((front, number, count))
}

/// Maps a file and its further parts, and merges their headers.
///
/// # Errors
/// A file cannot be read, is not the first part, or does not belong to the others; a part is missing.
pub(super) fn open(path: &Path) -> Result<(Vec<MappedFile>, Header), LoadError> {
    let (first, mut header) = open_one(path)?;
    let Some(count @ 2..) = size(&header, "split.count") else {
        return Ok((vec![first], header));
    };
    let name = parse_name(path).filter(|(_, _, named)| *named == count);
    let Some((front, number, _)) = name else {
        let problem = format!(
            "is {count}, but the file is not called NAME-00001-of-{count:05}.gguf; give the parts their names back"
        );
        return Err(LoadError::bad_config(path, "split.count", problem));
    };
    let of_number = |number| path.with_file_name(format!("{front}-{number:05}-of-{count:05}.gguf"));
    if number != 1 {
        let first = of_number(1);
        let problem = format!(
            "is part {number} of {count}; give the first, {}",
            first.display()
        );
        return Err(LoadError::bad_config(path, "split.no", problem));
    }
    let others: Vec<PathBuf> = (2..=count).map(of_number).collect();
    all_there(path, &others)?;
    let mut files = vec![first];
    for other in &others {
        let (file, part) = open_one(other)?;
        check_place(other, &part, files.len(), count)?;
        add(other, &mut header, part, files.len())?;
        files.push(file);
    }
    match size(&header, "split.tensors.count") {
        Some(tensors) if tensors != header.tensors.len() => {
            let found = header.tensors.len();
            let problem = format!("is {tensors}, but the parts have {found} tensors");
            Err(LoadError::bad_config(path, "split.tensors.count", problem))
        }
        Some(_) | None => Ok((files, header)),
    }
}

fn open_one(path: &Path) -> Result<(MappedFile, Header), LoadError> {
    let file = MappedFile::open(path)?;
    let header = Header::parse(&file).map_err(|error| match error {
        HeaderError::Broken(problem) => LoadError::broken(path, problem),
        HeaderError::BigEndian => {
            let fix = "little-endian files are; convert it";
            LoadError::unsupported(path, "byte order", "big-endian", fix)
        }
        HeaderError::Version(version) => {
            LoadError::unsupported(path, "GGUF version", version, "versions 2 and 3 are")
        }
    })?;
    Ok((file, header))
}

fn all_there(path: &Path, others: &[PathBuf]) -> Result<(), LoadError> {
    let mut missing = others.iter().filter(|other| !other.exists());
    let Some(first) = missing.next() else {
        return Ok(());
    };
    let problem = format!(
        "of {} parts {} are not there, such as {}",
        others.len() + 1,
        missing.count() + 1,
        first.display()
    );
    Err(LoadError::incomplete(path, problem))
}

/// Rejects a part of another model, or a part with a wrong number.
fn check_place(path: &Path, part: &Header, index: usize, count: usize) -> Result<(), LoadError> {
    for (key, expected) in [("split.no", index), ("split.count", count)] {
        let found = size(part, key);
        if found != Some(expected) {
            let found = found.map_or_else(|| "missing".to_owned(), |found| format!("is {found}"));
            let problem = format!("{found} and should be {expected}; is it another model's part?");
            return Err(LoadError::bad_config(path, key, problem));
        }
    }
    Ok(())
}

fn add(path: &Path, header: &mut Header, part: Header, file: usize) -> Result<(), LoadError> {
    for (name, mut info) in part.tensors {
        info.file = file;
        if header.tensors.contains_key(&name) {
            let problem = format!("it has tensor {name}, which a part before it has too");
            return Err(LoadError::broken(path, problem));
        }
        header.tensors.insert(name, info);
    }
    Ok(())
}

fn size(header: &Header, key: &str) -> Option<usize> {
    match header.metadata.get(key) {
        Some(Value::Integer(value)) => usize::try_from(*value).ok(),
        Some(_) | None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_told_from_others() {
        let of = |name| parse_name(Path::new(name));
        assert_eq!(of("a/m-Q4-00002-of-00003.gguf"), Some(("m-Q4", 2, 3)));
        assert_eq!(of("m-00001-of-00002.GGUF"), Some(("m", 1, 2)));
        for name in [
            "m.gguf",
            "m-00003-of-00002.gguf",
            "m-00000-of-00002.gguf",
            "m-1-of-2.gguf",
            "m-00001-of-00002.bin",
            "m-+0001-of-00002.gguf",
            "gguf",
        ] {
            assert_eq!(of(name), None, "{name}");
        }
    }
}
