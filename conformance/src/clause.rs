//! Finds a clause of the contract: a file and a line of the sources that this kit was built from, if they still exist. Useful
//! with a path or git dependency, whose sources an author can read.

use std::fs;
use std::path::{Path, PathBuf};

use crate::check::Check;

impl Check {
    /// The line of [`Self::clause`], such as `backend-common/src/engine.rs:84`; `None` if the sources are not available.
    #[must_use]
    pub fn source(&self) -> Option<String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?;
        let (file, line) = if self.clause.starts_with("docs/") {
            in_document(root, self.clause)?
        } else {
            in_code(&root.join("backend-common/src"), self.clause)?
        };
        let file = file
            .strip_prefix(root)
            .unwrap_or(&file)
            .display()
            .to_string();
        Some(format!("{file}:{line}"))
    }

    /// [`Self::clause`] and its [place](Self::source), if that is known.
    #[must_use]
    pub fn located_clause(&self) -> String {
        match self.source() {
            Some(source) => format!("{} ({source})", self.clause),
            None => self.clause.to_owned(),
        }
    }
}

/// The heading in a clause like `docs/page.md, Heading: detail`.
fn in_document(root: &Path, clause: &str) -> Option<(PathBuf, usize)> {
    let (page, rest) = clause.split_once(", ")?;
    let heading = rest.split([':', ';']).next()?.trim();
    let file = root.join(page);
    let text = fs::read_to_string(&file).ok()?;
    let is_heading =
        |line: &str| line.starts_with('#') && line.trim_start_matches(['#', ' ']) == heading;
    let line = text.lines().position(is_heading)?;
    Some((file, line + 1))
}

/// The item at the start of a clause like `Type::member, Section`.
fn in_code(sources: &Path, clause: &str) -> Option<(PathBuf, usize)> {
    let end = clause.find([',', ';', ' ']).unwrap_or(clause.len());
    let name = clause.get(..end)?.trim_end_matches(':');
    let (owner, member) = match name.split_once("::") {
        Some((owner, member)) => (owner, Some(member)),
        None => (name, None),
    };
    let files = files_under(sources);
    // A module's function is found by its own name; a member is found after its type.
    let is_module = owner.chars().next().is_some_and(char::is_lowercase);
    let wanted = if is_module { member? } else { owner };
    for file in files {
        let text = fs::read_to_string(&file).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let Some(place) = lines.iter().position(|line| defines(line, wanted)) else {
            continue;
        };
        let line = match member {
            Some(member) if !is_module => {
                let after = lines.iter().skip(place);
                place + after.clone().position(|line| is_member(line, member))?
            }
            Some(_) | None => place,
        };
        return Some((file, line + 1));
    }
    None
}

fn files_under(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        if path.is_dir() {
            files.extend(files_under(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort_unstable();
    files
}

/// Whether a line starts the definition of `name`, a type or a function of a module. An enum may be indented in `named!`.
fn defines(line: &str, name: &str) -> bool {
    let kinds = [
        "pub trait ",
        "pub struct ",
        "pub enum ",
        "    pub enum ",
        "pub type ",
        "pub fn ",
    ];
    let begins = |kind: &&str| {
        line.strip_prefix(*kind)
            .is_some_and(|rest| is_name(rest, name))
    };
    kinds.iter().any(begins)
}

/// Whether a line in a type starts its field, variant or method `name`.
fn is_member(line: &str, name: &str) -> bool {
    let line = line.trim_start();
    let kinds = [
        "pub async fn ",
        "pub const fn ",
        "pub fn ",
        "async fn ",
        "fn ",
        "pub ",
        "",
    ];
    let begins = |kind: &&str| {
        line.strip_prefix(*kind)
            .is_some_and(|rest| is_name(rest, name))
    };
    kinds.iter().any(begins)
}

/// Whether `text` starts with `name` as a whole word.
fn is_name(text: &str, name: &str) -> bool {
    let rest = text.strip_prefix(name);
    rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
}

#[cfg(test)]
mod tests {
    use crate::checks::{catalogue, find};

    #[test]
    fn every_clause_is_somewhere() {
        let lost: Vec<&str> = catalogue()
            .filter(|check| check.source().is_none())
            .map(|check| check.clause)
            .collect();
        assert!(lost.is_empty(), "no source has {lost:?}");
    }

    #[test]
    fn a_clause_is_where_its_item_is_defined() {
        let line_of = |id: &str| {
            let source = find(id).unwrap().source().unwrap();
            let (file, line) = source.rsplit_once(':').unwrap();
            let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
            let text = std::fs::read_to_string(format!("{root}/{file}")).unwrap();
            let line: usize = line.parse().unwrap();
            text.lines().nth(line - 1).unwrap().trim().to_owned()
        };
        assert_eq!(line_of("CN03"), "async fn generate(");
        assert_eq!(
            line_of("FN03"),
            "pub fn validate(&self) -> Result<(), EngineError> {"
        );
        assert!(line_of("SP09").contains("How it ends"));
    }
}
