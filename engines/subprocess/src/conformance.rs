//! [`SupervisedProcess`]: runs the conformance kit on a process under the same supervisor that workers use. For tests of
//! engines in separate processes, and for `genset conform`.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::LLMEngine;
use genset_conformance::{ChildCommand, Subject, Supervise};

use crate::config::SubprocessConfig;
use crate::engine::SubprocessEngine;

/// How the checks of the conformance kit run a process.
#[derive(Debug, Clone)]
pub struct SupervisedProcess {
    config: SubprocessConfig,
}

impl SupervisedProcess {
    /// The process of `config`.
    #[must_use]
    pub fn new(config: SubprocessConfig) -> Self {
        Self { config }
    }

    /// The engine in a process, and the way the kit runs its process.
    #[must_use]
    pub fn subject(&self) -> Subject {
        Subject::new(SubprocessEngine::new(self.config.clone()))
            .with_process(Arc::new(self.clone()))
    }

    /// The settings for another command, whose process may take `patience` to send its Hello, and as long to start.
    #[must_use]
    pub fn config_for(&self, command: ChildCommand, patience: Duration) -> SubprocessConfig {
        SubprocessConfig {
            program: command.program,
            args: command.args,
            env: command.env,
            cwd: command.cwd,
            hello_timeout: patience,
            start_timeout: patience,
            ..self.config.clone()
        }
    }
}

impl Supervise for SupervisedProcess {
    fn command(&self) -> ChildCommand {
        let config = self.config.clone();
        ChildCommand {
            program: config.program,
            args: config.args,
            env: config.env,
            cwd: config.cwd,
        }
    }

    fn supervise(&self, command: ChildCommand, patience: Duration) -> Arc<dyn LLMEngine> {
        Arc::new(SubprocessEngine::new(self.config_for(command, patience)))
    }
}
