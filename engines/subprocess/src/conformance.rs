//! A process as the subject of the conformance kit: [`SupervisedProcess`], with the supervisor that workers have. For tests of
//! engines in processes of their own, and for `genset conform`.

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

    /// The engine in a process, and how its process is run.
    #[must_use]
    pub fn subject(&self) -> Subject {
        Subject::new(SubprocessEngine::new(self.config.clone()))
            .with_process(Arc::new(self.clone()))
    }

    /// The settings for another command, whose process has `patience` to greet, and as long to start.
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
