//! Settings that all engines of a process share: threads, instructions and the bits of activations.

use genset_backend_common::EngineError;
use genset_kernels::{choose_activation_bits, choose_isa, quantized_kernels};

use crate::args::{ActivationBits, IsaChoice};
use crate::cores::Cores;

/// The number of threads if `--threads` is not set.
const RAYONS_VARIABLE: &str = "RAYON_NUM_THREADS";

/// Sets the number of threads of this process; the first engine's choice applies to all.
pub(crate) fn set_threads(threads: Option<usize>) -> Result<(), EngineError> {
    if threads == Some(0) {
        return Err(EngineError::invalid_argument(
            "--threads",
            "must be at least 1",
        ));
    }
    let cores = Cores::of_machine();
    // Rayon reads its variable unless it gets a number.
    let is_rayons = threads.is_none() && std::env::var_os(RAYONS_VARIABLE).is_some();
    let wanted = if is_rayons {
        0
    } else {
        threads.unwrap_or(cores.threads())
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(wanted);
    match (threads, pool.build_global().is_ok()) {
        (Some(_), true) => tracing::info!("the CPU computes with {wanted} threads: --threads"),
        (None, true) if is_rayons => tracing::info!(
            "the CPU computes with {} threads: {RAYONS_VARIABLE}",
            rayon::current_num_threads()
        ),
        (None, true) => tracing::info!("the CPU computes with {cores}"),
        (Some(threads), false) => tracing::warn!(
            threads,
            "this process has its threads already; --threads has no effect"
        ),
        (None, false) => {}
    }
    Ok(())
}

/// Limits the instructions of this process; the first engine's choice applies to all.
pub(crate) fn set_isa(choice: IsaChoice) -> Result<(), EngineError> {
    let chosen =
        choose_isa(choice).map_err(|problem| EngineError::invalid_argument("--isa", problem))?;
    if !chosen {
        tracing::warn!(isa = %choice, "this process computes with other instructions already; --isa has no effect");
    }
    Ok(())
}

/// Sets the precision of the inputs of quantized products in this process; the first engine's choice applies to all.
pub(crate) fn set_activation_bits(bits: ActivationBits, is_cpu: bool) -> Result<(), EngineError> {
    let refused = |problem| Err(EngineError::invalid_argument("--activation-bits", problem));
    if bits != ActivationBits::default() && !is_cpu {
        return refused("it has no effect on a GPU; leave the flag out");
    }
    if bits != ActivationBits::default() && quantized_kernels().is_none() {
        return refused(
            "this processor has neither AVX2 nor NEON, which it needs; leave the flag out",
        );
    }
    if !choose_activation_bits(bits) {
        tracing::warn!(%bits, "this process computes with other activations already; --activation-bits has no effect");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_refuses_bits_that_only_the_cpu_has() {
        let error = set_activation_bits(ActivationBits::Sixteen, false).unwrap_err();
        assert_eq!(error.at().map(|at| at.name()), Some("--activation-bits"));
        assert!(error.message().contains("a GPU"), "{error}");
        set_activation_bits(ActivationBits::Eight, false).unwrap();
    }
}
