//! `genset pull`, `genset list` and `genset rm`.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use genset_backend_common::EngineError;
use genset_hub::{CachedModel, HubError, ModelRef, Needs, RepoId};
use indicatif::HumanBytes;
use serde_json::json;

use crate::input::{complain, escaped, print};

/// The exit code if a model to delete does not exist.
const ABSENT: u8 = 1;

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// ORG/NAME, ORG/NAME:QUANTIZATION, hf://ORG/NAME@REVISION or hf://ORG/NAME/FILE.gguf
    model: String,
    /// Fetch configuration and tokenizer alone, no weights
    #[arg(long)]
    config_only: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// Models, each as ORG/NAME or hf://ORG/NAME
    #[arg(required = true, value_name = "MODEL")]
    models: Vec<String>,
}

/// Downloads a model, and prints its path.
///
/// # Errors
/// `InvalidArgument`, saying what to do, or `Unavailable`: the hub is unreachable and the model is not cached.
pub(crate) fn pull(args: &PullArgs) -> Result<u8, EngineError> {
    let model: ModelRef = args.model.parse().map_err(bad)?;
    let needs = match args.config_only {
        true => Needs::Config,
        false => Needs::WeightsOrGguf,
    };
    let fetched = super::fetch("MODEL", &model, needs)?;
    print(&format!("{}\n", fetched.path.display()));
    Ok(0)
}

/// Prints the models in the cache.
///
/// # Errors
/// When the cache cannot be read.
pub(crate) fn list(args: &ListArgs) -> Result<u8, EngineError> {
    let hub = super::hub().map_err(bad)?;
    let models = hub.cache().list().map_err(bad)?;
    let text = if args.json {
        let models: Vec<_> = models.iter().map(in_json).collect();
        format!("{:#}\n", json!(models))
    } else if models.is_empty() {
        format!(
            "no models in {}; `genset pull ORG/NAME` fetches one\n",
            hub.cache().root().display()
        )
    } else {
        escaped(&table(&models))
    };
    print(&text);
    Ok(0)
}

fn in_json(model: &CachedModel) -> serde_json::Value {
    let seconds = |at: SystemTime| {
        at.duration_since(UNIX_EPOCH)
            .ok()
            .map(|since| since.as_secs())
    };
    json!({
        "model": model.repo.to_string(),
        "bytes": model.bytes,
        "is_partial": model.is_partial,
        "last_used": model.last_used.and_then(seconds),
        "gguf": model.gguf,
        "path": model.path,
    })
}

fn table(models: &[CachedModel]) -> String {
    let width = models
        .iter()
        .map(|model| model.repo.to_string().len())
        .max()
        .unwrap_or(0)
        .max("MODEL".len());
    let mut text = format!("{:width$}  {:>11}  LAST USED\n", "MODEL", "SIZE");
    for model in models {
        let size = HumanBytes(model.bytes).to_string();
        let used = model.last_used.and_then(|at| at.elapsed().ok());
        let used = used.map_or("unknown".into(), ago);
        // The cache does not know the name as typed, which may include a quantization or a file.
        let partial = match model.is_partial {
            true => format!(
                "  (not whole: the same `genset pull` continues, `genset rm {}` deletes it)",
                model.repo
            ),
            false => String::new(),
        };
        // Writing to a string cannot fail.
        let _infallible = writeln!(
            text,
            "{:width$}  {size:>11}  {used}{partial}",
            model.repo.to_string()
        );
        for file in &model.gguf {
            let _infallible = writeln!(text, "  {file}");
        }
    }
    text
}

fn ago(since: Duration) -> String {
    let minutes = since.as_secs() / 60;
    let (count, unit) = match minutes {
        0 => return "just now".into(),
        1..60 => (minutes, "minute"),
        60..1440 => (minutes / 60, "hour"),
        _ => (minutes / 1440, "day"),
    };
    let many = if count == 1 { "" } else { "s" };
    format!("{count} {unit}{many} ago")
}

/// Deletes models. If one does not exist, the others are still deleted, and the exit code says so.
///
/// # Errors
/// If a word does not name a whole model, before any is deleted; if one cannot be deleted.
pub(crate) fn rm(args: &RmArgs) -> Result<u8, EngineError> {
    let hub = super::hub().map_err(bad)?;
    let repos = args.models.iter().map(|name| whole(name));
    let repos: Vec<RepoId> = repos.collect::<Result<_, _>>()?;
    let mut code = 0;
    for repo in &repos {
        match hub.cache().remove(repo).map_err(bad)? {
            Some(bytes) => print(&format!("deleted {repo}, {}\n", HumanBytes(bytes))),
            None => {
                let known = hub.cache().list().map_err(bad)?;
                let known: Vec<String> = known.iter().map(|model| model.repo.to_string()).collect();
                complain(format_args!(
                    "{repo} is not in the cache; the cache has {}",
                    some(&known)
                ));
                code = ABSENT;
            }
        }
    }
    Ok(code)
}

/// The repository to delete, which `name` must name as a whole.
fn whole(name: &str) -> Result<RepoId, EngineError> {
    let model: ModelRef = name.parse().map_err(bad)?;
    if model.revision.is_none() && !model.names_gguf() {
        return Ok(model.repo);
    }
    let repo = model.repo;
    let problem =
        format!("{name:?} is a part of {repo}; `genset rm {repo}` deletes the whole model");
    Err(EngineError::invalid_argument("MODEL", problem))
}

fn some(names: &[String]) -> String {
    if names.is_empty() {
        "none".into()
    } else {
        names.join(", ")
    }
}

fn bad(error: HubError) -> EngineError {
    EngineError::invalid_argument("MODEL", error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_whole_is_told_with_both_ways_out() {
        let model = CachedModel {
            repo: "org/m-GGUF".parse().unwrap(),
            bytes: 1,
            is_partial: true,
            last_used: None,
            gguf: Vec::new(),
            path: "/nowhere".into(),
        };
        let text = table(&[model]);
        assert!(text.contains("the same `genset pull` continues"), "{text}");
        assert!(text.contains("`genset rm org/m-GGUF`"), "{text}");
    }

    #[test]
    fn a_model_is_deleted_by_every_name_of_the_whole() {
        for name in ["org/m", "hf://org/m"] {
            assert_eq!(whole(name).unwrap().to_string(), "org/m");
        }
        for name in ["org/m:Q8_0", "org/m@main", "hf://org/m/m.gguf"] {
            let error = whole(name).unwrap_err();
            assert!(error.message().contains("`genset rm org/m`"), "{error}");
        }
        assert!(whole("m").is_err());
    }

    #[test]
    fn times_are_told_as_people_do() {
        for (seconds, expected) in [
            (0, "just now"),
            (61, "1 minute ago"),
            (7200, "2 hours ago"),
            (86_400, "1 day ago"),
            (10 * 86_400, "10 days ago"),
        ] {
            assert_eq!(ago(Duration::from_secs(seconds)), expected);
        }
    }
}
