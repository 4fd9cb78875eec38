//! The installed engines beside those in the binary, and their versions.

use super::finding::Finding;
use super::said;
use crate::engine::apart::Apart;

const AREA: &str = "Engines";

/// A server of another project: the word after `out=`, the commands that print its version (the first that is installed counts),
/// and how to install it.
struct Server {
    word: &'static str,
    asked: &'static [&'static [&'static str]],
    install: &'static str,
}

/// For Python packages the metadata is read: importing one of them takes half a minute.
const SERVERS: [Server; 5] = [
    Server {
        word: "vllm",
        asked: &[&[
            "python3",
            "-c",
            "import importlib.metadata as m; print(m.version('vllm'))",
        ]],
        install: "pip install vllm",
    },
    Server {
        word: "sglang",
        asked: &[&[
            "python3",
            "-c",
            "import importlib.metadata as m; print(m.version('sglang'))",
        ]],
        install: "pip install 'sglang[all]'",
    },
    Server {
        word: "trtllm",
        asked: &[&[
            "python3",
            "-c",
            "import importlib.metadata as m; print(m.version('tensorrt_llm'))",
        ]],
        install: "pip install tensorrt_llm",
    },
    Server {
        word: "llamacpp",
        // As in the launcher: these are the modules that it looks for.
        asked: &[
            &["llama-server", "--version"],
            &[
                "python3",
                "-c",
                "import importlib.metadata as m; v = m.version; v('uvicorn'), v('sse_starlette'); print('llama_cpp.server', v('llama_cpp_python'))",
            ],
        ],
        install: "put llama-server of llama.cpp on the PATH, or pip install 'llama-cpp-python[server]'",
    },
    Server {
        word: "cmd:python3 ...",
        asked: &[&[
            "python3",
            "-c",
            "import importlib.metadata as m; print(m.version('genset'))",
        ]],
        install: "pip install ./python (of this repository), for engines in Python",
    },
];

/// The longest version to show, in characters.
const MAX_VERSION: usize = 80;

pub(super) async fn look() -> Vec<Finding> {
    let built_in = "built in: candle, mocker, echo_core, echo_full, scripted, sample";
    let mut findings = vec![Finding::ok(AREA, built_in)];
    findings.extend(Apart::ALL.map(apart));
    let versions = futures_util::future::join_all(SERVERS.iter().map(version)).await;
    findings.extend(SERVERS.iter().zip(versions).map(|(server, version)| {
        let word = server.word;
        match version {
            // llama-server first prints information about the machine.
            Some(text) => {
                let line = text
                    .lines()
                    .find(|line| line.contains("version"))
                    .or(text.lines().next());
                let version: String = line.unwrap_or_default().chars().take(MAX_VERSION).collect();
                Finding::ok(AREA, format!("out={word}: {version}"))
            }
            // Not a problem: nothing else needs it.
            None => Finding::ok(
                AREA,
                format!("out={word}: not installed ({})", server.install),
            ),
        }
    }));
    findings
}

/// The output of the first installed command.
async fn version(server: &Server) -> Option<String> {
    for words in server.asked {
        let said = said(words[0], &words[1..]).await;
        if said.is_some() {
            return said;
        }
    }
    None
}

/// An engine of Genset whose program is built separately.
fn apart(engine: Apart) -> Finding {
    let word = engine.word();
    let what = match engine.program() {
        Some(program) => format!("out={word}: {}", program.display()),
        None => format!(
            "out={word}: not installed ({}, in a checkout of Genset)",
            engine.build_line()
        ),
    };
    Finding::ok(AREA, what)
}
