//! A command as the kit's subject: an engine in a process of its own, with the supervisor that workers have.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::LLMEngine;
use genset_conformance::{ChildCommand, Subject, Supervise};
use genset_engine_subprocess::{SubprocessConfig, SubprocessEngine};

use super::run::BoxFactory;

/// Engines that `config` starts, each in a process of its own.
pub(super) fn factory(config: SubprocessConfig) -> BoxFactory {
    let process = Arc::new(Supervised(config));
    Box::new(move |_| {
        let engine = SubprocessEngine::new(process.0.clone());
        Subject::new(engine).with_process(Arc::clone(&process) as Arc<dyn Supervise>)
    })
}

struct Supervised(SubprocessConfig);

impl Supervise for Supervised {
    fn command(&self) -> ChildCommand {
        let config = self.0.clone();
        ChildCommand {
            program: config.program,
            args: config.args,
            env: config.env,
            cwd: config.cwd,
        }
    }

    fn supervise(&self, command: ChildCommand, patience: Duration) -> Arc<dyn LLMEngine> {
        let config = SubprocessConfig {
            program: command.program,
            args: command.args,
            env: command.env,
            cwd: command.cwd,
            hello_timeout: patience,
            start_timeout: patience,
            ..self.0.clone()
        };
        Arc::new(SubprocessEngine::new(config))
    }
}
