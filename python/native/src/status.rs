//! [`StatusPort`]: a Python program's status server. It is ready while the program serves something and all of it is listed. Operators
//! control the model that it serves. `node` is the only caller.

use std::collections::HashMap;
use std::sync::Arc;

use genset_backend_common::ports::Control;
use genset_backend_common::{
    EngineError, async_trait,
    controls::{ControlReply, ControlRequest},
    error::At,
};
use genset_runtime::{
    ControlDoor, Health, HealthSource, NetworkArgs, Runtime, StatusArgs, StatusServer,
};

use crate::served::{Served, ServedByNumber};

/// The status server, once requested.
#[derive(Debug, Default)]
pub(crate) struct StatusPort(Option<StatusServer>);

impl StatusPort {
    /// Listens, unless it does already or `args` name no port. Returns the port.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flags and the address, if it cannot listen, or naming the file of the control secret.
    pub(crate) async fn open(
        &mut self,
        args: &StatusArgs,
        network: &NetworkArgs,
        runtime: &Runtime,
        served: &ServedByNumber,
    ) -> Result<Option<u64>, EngineError> {
        if self.0.is_none() && args.status_port.is_some() {
            let control = Arc::new(OnlyModel(Arc::clone(served)));
            let door = ControlDoor::new(control, network.control_secret()?);
            self.0 = args.listen(runtime, health(served), Some(door)).await?;
        }
        Ok(self
            .0
            .as_ref()
            .map(|server| u64::from(server.address().port())))
    }
}

fn health(served: &ServedByNumber) -> HealthSource {
    let served = Arc::clone(served);
    HealthSource::new(move || health_of(&served.lock()))
}

fn health_of(served: &HashMap<u64, Served>) -> Health {
    let mut models = served.values().filter_map(Served::model);
    let worker = match (models.next(), models.next()) {
        (Some(model), None) => {
            let status = model.worker.status().borrow().clone();
            Some((status, model.name.clone()))
        }
        // With several models, none is the process's own.
        (Some(_), Some(_)) | (None, _) => None,
    };
    Health {
        is_ready: !served.is_empty() && served.values().all(Served::is_ready),
        worker,
    }
}

/// Controls the only served model, whichever it is.
struct OnlyModel(ServedByNumber);

impl OnlyModel {
    fn control_of_it(&self) -> Result<Arc<dyn Control>, EngineError> {
        let served = self.0.lock();
        let mut models = served.values().filter_map(Served::model);
        let found = (models.next(), models.next());
        match found {
            (Some(model), None) => Ok(model.worker.control()),
            (Some(_), Some(_)) => {
                let problem = "is for one model, and this process serves several; ask the endpoint that is meant, with `genset control`";
                Err(EngineError::unsupported(At::other("op"), problem))
            }
            (None, _) => Err(EngineError::not_found("this process serves no model")),
        }
    }
}

#[async_trait]
impl Control for OnlyModel {
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let control = self.control_of_it()?;
        control.control(request).await
    }
}
