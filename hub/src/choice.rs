//! Selects the files of a repository that an engine needs. Pure.

use std::collections::BTreeMap;

use crate::error::HubError;
use crate::reference::ModelRef;

/// The files that an engine needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Configuration, tokenizer and chat template.
    Config,
    /// Those of [`Config`](Self::Config), and weights in safetensors.
    Weights,
    /// One GGUF file, with all its parts.
    Gguf,
    /// Weights in safetensors; or a GGUF file if there are none or the name says so.
    WeightsOrGguf,
}

/// The selected files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    /// Paths in the repository, without duplicates.
    pub(crate) files: Vec<String>,
    /// The file to pass to the engine; `None` to pass the folder.
    pub(crate) file: Option<String>,
}

/// Default quantizations, best first: small enough for most machines, with little loss.
const USUAL: [&str; 4] = ["Q4_K_M", "Q8_0", "BF16", "F16"];

/// The most parts of a GGUF file.
const MAX_PARTS: u32 = 1000;

/// Selects among the paths of a repository.
///
/// # Errors
/// `NoFile`, listing what there is.
pub(crate) fn choose<'a>(
    model: &ModelRef,
    needs: Needs,
    names: impl Iterator<Item = &'a str> + Clone,
) -> Result<Choice, HubError> {
    let no_file = |problem: String| HubError::NoFile {
        model: Box::new(model.clone()),
        problem,
    };
    let wants_gguf = match needs {
        Needs::Gguf => true,
        Needs::WeightsOrGguf => model.names_gguf() || !{ names.clone() }.any(is_weights),
        Needs::Config | Needs::Weights if model.names_gguf() => {
            let problem = "GGUF files, which this engine does not read; name the model that they were made of";
            return Err(no_file(problem.into()));
        }
        Needs::Config | Needs::Weights => false,
    };
    if wants_gguf {
        let file = gguf(model, needs, names.clone()).map_err(no_file)?;
        let files = parts(&file);
        if let Some(absent) = files
            .iter()
            .find(|file| !{ names.clone() }.any(|name| name == *file))
        {
            return Err(no_file(format!(
                "no file {absent}, a part of the same model as {file}"
            )));
        }
        let file = files.first().cloned();
        return Ok(Choice { files, file });
    }
    let files: Vec<String> = { names.clone() }
        .filter(|name| is_config(name) || (needs != Needs::Config && is_read_beside(name)))
        .map(Into::into)
        .collect();
    if !files.iter().any(|name| name == "config.json") {
        return Err(no_file(
            "no config.json, so it is no model in the form that engines read".into(),
        ));
    }
    if needs != Needs::Config && !files.iter().any(|name| is_weights(name)) {
        let problem =
            "no weights in safetensors; look for a conversion of it with safetensors or GGUF files";
        return Err(no_file(problem.into()));
    }
    Ok(Choice { files, file: None })
}

/// Whether it holds weights, of the model or of a module after it, or a model's own code. Servers in Python run that code if the
/// operator allows it (`trust_remote_code`); Genset never does.
fn is_read_beside(name: &str) -> bool {
    let is_code = !name.contains('/') && name.ends_with(".py");
    is_weights(name) || in_module(name) == Some("model.safetensors") || is_code
}

/// A file's name if it is in the folder of a `sentence-transformers` module, such as `1_Pooling`.
fn in_module(name: &str) -> Option<&str> {
    let (folder, file) = name.split_once('/')?;
    let (number, kind) = folder.split_once('_')?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let is_kind = !kind.is_empty() && kind.bytes().all(|byte| byte.is_ascii_alphabetic());
    (is_number && is_kind).then_some(file)
}

/// Whether it is a configuration, tokenizer or template file of the model as published; files for other formats are in
/// subfolders.
fn is_config(name: &str) -> bool {
    let ends = [".json", ".jinja", ".txt", ".model", ".tiktoken"];
    let is_template = name
        .strip_prefix("additional_chat_templates/")
        .is_some_and(|file| !file.contains('/') && file.ends_with(".jinja"));
    if is_template || in_module(name) == Some("config.json") {
        return true;
    }
    !name.contains('/')
        && ends.iter().any(|end| name.ends_with(end))
        && !name.ends_with(".bin.index.json")
        && !name.starts_with("consolidated")
}

/// Whether it holds weights. `consolidated` repeats the weights in the author's own format, and adapters are not models.
fn is_weights(name: &str) -> bool {
    !name.contains('/')
        && name.ends_with(".safetensors")
        && !name.starts_with("consolidated")
        && !name.starts_with("adapter_")
}

fn is_gguf(name: &str) -> bool {
    // The other files are multimodal projectors, and importance matrices of the quantization.
    let lower = name.to_ascii_lowercase();
    lower.ends_with(".gguf") && !lower.contains("mmproj") && !lower.contains("imatrix")
}

fn gguf<'a>(
    model: &ModelRef,
    needs: Needs,
    names: impl Iterator<Item = &'a str> + Clone,
) -> Result<String, String> {
    if let Some(file) = &model.file {
        let is_there = { names.clone() }.any(|name| name == file);
        return match is_there {
            true => Ok(file.clone()),
            false => Err(format!(
                "no file {file}; its GGUF files are {}",
                listed(names.filter(|name| is_gguf(name)))
            )),
        };
    }
    let files: Vec<&str> = names.filter(|name| is_gguf(name)).collect();
    let first_of = |quantization: &str| {
        let mut found: Vec<&str> = { files.iter().copied() }
            .filter(|name| is_of(name, quantization))
            .collect();
        // The shallowest and shortest: the others are variants of it.
        found.sort_by_key(|name| (name.matches('/').count(), name.len(), *name));
        found.first().map(|name| (*name).to_owned())
    };
    let there_is = || listed(files.iter().copied());
    match &model.quantization {
        Some(quantization) => first_of(quantization).ok_or_else(|| {
            format!(
                "no GGUF file with the quantization {quantization}; there is {}",
                there_is()
            )
        }),
        None if files.is_empty() && needs == Needs::Gguf => {
            Err("no GGUF file; look for a conversion of it, often named NAME-GGUF".into())
        }
        None if files.is_empty() => Err("neither weights in safetensors nor a GGUF file".into()),
        None => { USUAL.iter() }
            .find_map(|usual| first_of(usual))
            .or_else(|| only(&files))
            .ok_or_else(|| {
                format!(
                    "several GGUF files; choose one as ORG/NAME:QUANTIZATION, of {}",
                    there_is()
                )
            }),
    }
}

/// The only file, which may have several parts.
fn only(files: &[&str]) -> Option<String> {
    let [first, rest @ ..] = files else {
        return None;
    };
    let is_one = rest
        .iter()
        .all(|name| part_of(name).is_some() && part_of(name) == part_of(first));
    is_one.then(|| (*first).to_owned())
}

/// Whether a file has this quantization: as a word in its name, ignoring case.
fn is_of(name: &str, quantization: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let wanted = quantization.to_ascii_lowercase();
    let is_edge =
        |byte: Option<u8>| byte.is_none_or(|byte| !byte.is_ascii_alphanumeric() && byte != b'_');
    name.match_indices(&wanted).any(|(at, _)| {
        let before = at.checked_sub(1).map(|at| name.as_bytes()[at]);
        let after = name.as_bytes().get(at + wanted.len()).copied();
        is_edge(before) && is_edge(after)
    })
}

/// Whether the files include all parts of each set, such as `model-00001-of-00003.safetensors`. Paths must be unique.
pub(crate) fn has_all_shards(files: &[String]) -> bool {
    let mut sets: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for file in files {
        if let Some(set) = file.strip_suffix(".safetensors").and_then(numbered) {
            *sets.entry(set).or_default() += 1;
        }
    }
    sets.into_iter().all(|((_, count), found)| {
        let count = count.parse::<usize>();
        count.is_ok_and(|count| found >= count)
    })
}

/// The name before `-00001-of-00003.gguf`, with the count.
fn part_of(name: &str) -> Option<(&str, &str)> {
    numbered(name.strip_suffix(".gguf")?)
}

/// The name before `-00001-of-00003`, with the count.
fn numbered(name: &str) -> Option<(&str, &str)> {
    let (rest, count) = name.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(count) && is_number(number)).then_some((stem, count))
}

/// The file, or all its parts if its name says that it has several.
fn parts(file: &str) -> Vec<String> {
    let of_all = part_of(file).and_then(|(stem, count)| Some((stem, count, count.parse().ok()?)));
    match of_all {
        Some((stem, count, number @ 1..=MAX_PARTS)) => {
            let width = count.len();
            let part = |part| format!("{stem}-{part:0width$}-of-{count}.gguf");
            (1..=number).map(part).collect()
        }
        _ => vec![file.to_owned()],
    }
}

/// Some names, formatted for people.
fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const MOST: usize = 20;
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    let more = names.len().saturating_sub(MOST);
    names.truncate(MOST);
    match (names.len(), more) {
        (0, _) => "none".into(),
        (_, 0) => names.join(", "),
        (_, more) => format!("{} and {more} more", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &[&str] = &[
        ".gitattributes",
        "README.md",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/old/rag.jinja",
        "modeling_own.py",
        "onnx/convert.py",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.onnx",
        "adapter_model.safetensors",
    ];
    const GGUF: &[&str] = &[
        "README.md",
        "m-Q4_K_M.gguf",
        "m-Q4_K_S.gguf",
        "m-IQ4_XS.gguf",
        "m-q8_0.gguf",
        "mmproj-F16.gguf",
        "BF16/m-BF16-00001-of-00002.gguf",
        "BF16/m-BF16-00002-of-00002.gguf",
        "imatrix_unsloth.gguf",
    ];

    fn chosen(
        model: &str,
        needs: Needs,
        names: &[&str],
    ) -> Result<(Vec<String>, Option<String>), String> {
        let model = model.parse().unwrap();
        let choice = choose(&model, needs, names.iter().copied());
        choice
            .map(|choice| (choice.files, choice.file))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn only_what_an_engine_reads_is_chosen() {
        let (config, file) = chosen("a/b", Needs::Config, PLAIN).unwrap();
        let expected = [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "merges.txt",
            "chat_template.jinja",
            "additional_chat_templates/tool_use.jinja",
            "model.safetensors.index.json",
        ];
        assert_eq!(
            (config.as_slice(), file),
            (&expected.map(String::from)[..], None)
        );
        for needs in [Needs::Weights, Needs::WeightsOrGguf] {
            let (files, file) = chosen("a/b", needs, PLAIN).unwrap();
            let more = files.iter().filter(|it| !config.contains(it));
            let more: Vec<&str> = more.map(String::as_str).collect();
            let expected = [
                "modeling_own.py",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
            ];
            assert_eq!((more.as_slice(), file), (&expected[..], None));
        }
    }

    #[test]
    fn an_embedders_modules_are_chosen_with_it() {
        let names = [
            "config.json",
            "modules.json",
            "model.safetensors",
            "1_Pooling/config.json",
            "2_Dense/config.json",
            "2_Dense/model.safetensors",
            "2_Dense/pytorch_model.bin",
            "onnx/model.safetensors",
            "1_Pooling/a/config.json",
        ];
        let (files, _) = chosen("a/b", Needs::WeightsOrGguf, &names).unwrap();
        assert_eq!(files, names[..6]);
        let (config, _) = chosen("a/b", Needs::Config, &names).unwrap();
        assert_eq!(config.len(), 4, "no weights");
    }

    #[test]
    fn a_gguf_file_is_chosen_by_its_quantization() {
        for (model, expected) in [
            ("a/b", "m-Q4_K_M.gguf"),
            ("a/b:q4_k_s", "m-Q4_K_S.gguf"),
            ("a/b:Q8_0", "m-q8_0.gguf"),
            ("a/b:IQ4_XS", "m-IQ4_XS.gguf"),
            ("a/b/m-q8_0.gguf", "m-q8_0.gguf"),
        ] {
            for needs in [Needs::Gguf, Needs::WeightsOrGguf] {
                let (files, file) = chosen(model, needs, GGUF).unwrap();
                assert_eq!(
                    (files, file),
                    (vec![expected.to_owned()], Some(expected.into()))
                );
            }
        }
        let (files, file) = chosen("a/b:BF16", Needs::Gguf, GGUF).unwrap();
        assert_eq!(
            (files.len(), file.as_deref()),
            (2, Some("BF16/m-BF16-00001-of-00002.gguf"))
        );
        let only = ["x-Q2_K-00001-of-00002.gguf", "x-Q2_K-00002-of-00002.gguf"];
        assert_eq!(chosen("a/b", Needs::Gguf, &only).unwrap().0, only);
    }

    #[test]
    fn shards_are_whole_when_all_of_a_set_are_there() {
        for (names, expected) in [
            (&["model.safetensors", "config.json"][..], true),
            (&["m-00001-of-00002.safetensors"], false),
            (
                &["m-1-of-02.safetensors", "m-2-of-02.safetensors", "x-of-b"],
                true,
            ),
            (
                // The two belong to different sets.
                &["m-1-of-2.safetensors", "n-2-of-2.safetensors"],
                false,
            ),
            (&["m-1-of-99999999999999999999999.safetensors"], false),
        ] {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            assert_eq!(has_all_shards(&names), expected, "{names:?}");
        }
    }

    #[test]
    fn what_is_missing_is_told_with_what_there_is() {
        for (model, needs, names, expected) in [
            (
                "a/b:Q5_K_M",
                Needs::Gguf,
                GGUF,
                "there is BF16/m-BF16-00001-of-00002.gguf, ",
            ),
            (
                "a/b:Q4_K",
                Needs::Gguf,
                GGUF,
                "no GGUF file with the quantization Q4_K;",
            ),
            (
                "a/b/c.gguf",
                Needs::Gguf,
                GGUF,
                "no file c.gguf; its GGUF files are ",
            ),
            ("a/b", Needs::Gguf, PLAIN, "no GGUF file; look for"),
            ("a/b:Q4_0", Needs::Weights, GGUF, "does not read"),
            ("a/b", Needs::Weights, GGUF, "no config.json"),
            (
                "a/b",
                Needs::Weights,
                &["config.json", "pytorch_model.bin"],
                "no weights in safetensors",
            ),
            ("a/b", Needs::WeightsOrGguf, &["config.json"], "neither"),
            (
                "a/b",
                Needs::Gguf,
                &["x-Q2_K-00001-of-00002.gguf"],
                "no file x-Q2_K-00002-of-00002.gguf",
            ),
            (
                "a/b",
                Needs::Gguf,
                &["x-Q2_K.gguf", "x-Q3_K.gguf"],
                "of x-Q2_K.gguf, x-Q3_K.gguf",
            ),
        ] {
            let error = chosen(model, needs, names).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
