//! Stop tokens of one request that end another.

use std::sync::Arc;

use genset_backend_common::{EngineError, OutputStream, TokenId};
use parking_lot::Mutex;

use crate::mutants::fault::{Call, Fault, held_to_end, others};

/// A request that arrives while another runs also gets the stop tokens of the previous one.
#[derive(Default)]
pub(super) struct OfTheBatch {
    active: Arc<()>,
    last: Mutex<Vec<TokenId>>,
}

impl Fault for OfTheBatch {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        let stops = &mut call.request.stop.stop_token_ids;
        let before = std::mem::replace(&mut *self.last.lock(), stops.to_vec());
        if others(&self.active) > 0 {
            stops.extend(before);
        }
        Ok(())
    }

    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        held_to_end(outputs, Arc::clone(&self.active))
    }
}
