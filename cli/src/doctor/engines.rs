//! The installed engines beside those in the binary, and their versions.

use super::finding::Finding;
use super::said;
use crate::engine::apart::Apart;

/// A server of another project, or the Python package: the word after `out=`, how its version is found, and how to install it.
struct Server {
    word: &'static str,
    /// The program that prints its version, if that is not a Python package alone.
    program: Option<&'static str>,
    /// Python code that prints the version of the package. It reads the metadata, `m`: to import one of them takes half a minute.
    code: &'static str,
    install: &'static str,
}

const SERVERS: [Server; 5] = [
    Server {
        word: "vllm",
        program: None,
        code: "print(m.version('vllm'))",
        install: "pip install vllm",
    },
    Server {
        word: "sglang",
        program: None,
        code: "print(m.version('sglang'))",
        install: "pip install 'sglang[all]'",
    },
    Server {
        word: "trtllm",
        program: None,
        code: "print(m.version('tensorrt_llm'))",
        install: "pip install tensorrt_llm",
    },
    Server {
        word: "llamacpp",
        program: Some("llama-server"),
        // As in the launcher: these are the modules that it looks for.
        code: "v = m.version; v('uvicorn'), v('sse_starlette'); print('llama_cpp.server', v('llama_cpp_python'))",
        install: "put llama-server of llama.cpp on the PATH, or pip install 'llama-cpp-python[server]'",
    },
    Server {
        word: "cmd:python3 ...",
        program: None,
        code: "print(m.version('genset'))",
        install: "pip install ./python (of this repository), for engines in Python",
    },
];

/// The longest version to show, in characters.
const MAX_VERSION: usize = 80;

pub(super) async fn look() -> Vec<Finding> {
    let built_in = "built in: candle, mocker, echo_core, echo_full, scripted, sample";
    let mut findings = vec![Finding::ok(built_in)];
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
                Finding::ok(format!("out={word}: {version}"))
            }
            // Not a problem: nothing else needs it.
            None => Finding::ok(format!("out={word}: not installed ({})", server.install)),
        }
    }));
    findings
}

/// What its program says of itself, or else its package.
async fn version(server: &Server) -> Option<String> {
    if let Some(program) = server.program
        && let Some(said) = said(program, &["--version"]).await
    {
        return Some(said);
    }
    let code = format!("import importlib.metadata as m; {}", server.code);
    said("python3", &["-c", &code]).await
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
    Finding::ok(what)
}
