//! The program keeps the contract as a worker runs it, in a separate process: the whole conformance kit, on a checkout and on a GGUF
//! file of tiny-chat, and on a Qwen3 with random weights. `cargo xtask engines-test` makes that model and runs this.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use genset_conformance::{Detokenize, Scenario, run_conformance};
use genset_engine_subprocess::{SubprocessConfig, SupervisedProcess};
use tokenizers::Tokenizer;

const TINY_CHAT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-chat");

/// Tests one model. All models here have the tokenizer of tiny-chat.
fn conforms(model: &Path) {
    let tokenizer = Tokenizer::from_file(Path::new(TINY_CHAT).join("tokenizer.json"));
    let tokenizer = tokenizer.expect("the tokenizer of tiny-chat");
    let text: Detokenize = Arc::new(move |tokens: &[u32]| {
        let text = tokenizer.decode(tokens, true);
        text.expect("a text")
    });
    let model = model.to_str().expect("UTF-8");
    let program = SubprocessConfig::new(env!("CARGO_BIN_EXE_genset-mistralrs"));
    let program = program.with_args([model, "--dtype", "f32"]);
    let process = SupervisedProcess::new(program);
    let subject = move |_: &Scenario| process.subject().with_text(Arc::clone(&text));
    let report = run_conformance(subject);
    eprintln!("{}", report.to_terminal(false));
    report.assert_conformant();
}

#[test]
fn with_a_checkout() {
    conforms(TINY_CHAT.as_ref());
}

#[test]
fn with_a_gguf_file() {
    conforms(&Path::new(TINY_CHAT).join("tiny-chat-q8_0.gguf"));
}

#[test]
fn with_a_random_qwen3() {
    let models = std::env::var_os("GENSET_TEST_MODELS").map(PathBuf::from);
    let models = models.expect("GENSET_TEST_MODELS: run `cargo xtask engines-test mistralrs`");
    conforms(&models.join("qwen3"));
}
