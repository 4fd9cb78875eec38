//! The engines that are installed beside those in the binary, and their versions.

use super::finding::Finding;
use super::said;

const AREA: &str = "Engines";

/// A server of another project: the word after `out=`, how its version is asked for, and how it is installed.
struct Server {
    word: &'static str,
    ask: &'static [&'static str],
    install: &'static str,
}

/// Python's packages are asked by their metadata: importing one of them takes half a minute.
const SERVERS: [Server; 5] = [
    Server {
        word: "vllm",
        ask: &[
            "python3",
            "-c",
            "import importlib.metadata as m; print(m.version('vllm'))",
        ],
        install: "pip install vllm",
    },
    Server {
        word: "sglang",
        ask: &[
            "python3",
            "-c",
            "import importlib.metadata as m; print(m.version('sglang'))",
        ],
        install: "pip install 'sglang[all]'",
    },
    Server {
        word: "trtllm",
        ask: &[
            "python3",
            "-c",
            "import importlib.metadata as m; print(m.version('tensorrt_llm'))",
        ],
        install: "pip install tensorrt_llm",
    },
    Server {
        word: "llamacpp",
        ask: &["llama-server", "--version"],
        install: "put llama-server of llama.cpp on the PATH",
    },
    Server {
        word: "cmd:python3 ...",
        ask: &[
            "python3",
            "-c",
            "import importlib.metadata as m; print(m.version('genset'))",
        ],
        install: "pip install ./python (of this repository), for engines in Python",
    },
];

/// How long a version may be that is shown, in characters.
const MAX_VERSION: usize = 80;

pub(super) async fn look() -> Vec<Finding> {
    let built_in = "built in: candle, mocker, echo_core, echo_full, scripted, sample";
    let mut findings = vec![Finding::ok(AREA, built_in)];
    let asked = SERVERS
        .iter()
        .map(|server| async move { said(server.ask[0], &server.ask[1..]).await });
    let versions = futures_util::future::join_all(asked).await;
    findings.extend(SERVERS.iter().zip(versions).map(|(server, version)| {
        let word = server.word;
        match version {
            // llama-server writes about the machine first.
            Some(text) => {
                let line = text
                    .lines()
                    .find(|line| line.contains("version"))
                    .or(text.lines().next());
                let version: String = line.unwrap_or_default().chars().take(MAX_VERSION).collect();
                Finding::ok(AREA, format!("out={word}: {version}"))
            }
            // No problem: nothing else needs it.
            None => Finding::ok(
                AREA,
                format!("out={word}: not installed ({})", server.install),
            ),
        }
    }));
    findings
}
