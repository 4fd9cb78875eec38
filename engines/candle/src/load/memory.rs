//! The memory that a model needs, and the memory that is available.

use std::fs;
use std::path::Path;

use candle_core::{Device, quantized::GgmlDType};
use genset_backend_common::machine::{ControlGroup, meminfo};
use genset_kernels::quantized_kernels;

use super::TensorFiles;
use super::plan::PlannedTensor;
use super::tensors::bytes_of;
use super::weights::{WeightOptions, to_u64};
use crate::error::{Bytes, LoadError};
use crate::model::WeightType;

/// The working memory of a step beyond weights and KV cache: activations, logits, and the process's base memory.
const WORKSPACE_BYTES: u64 = 256 << 20;

/// The memory that a model will take on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Weights, in the form they are kept in.
    pub weights: u64,
    /// Working memory, of loading one tensor at a time and later of a step.
    pub workspace: u64,
}

impl MemoryEstimate {
    pub(super) fn new(model: &dyn TensorFiles, options: &WeightOptions) -> Self {
        let mut weights = 0u64;
        let mut largest = 0u64;
        for tensor in model.planned() {
            let kept = kept_bytes(model, options, &tensor);
            weights = weights.saturating_add(kept);
            largest = largest.max(kept);
        }
        Self {
            weights,
            workspace: WORKSPACE_BYTES.max(largest),
        }
    }

    /// This model and another one together: both weights, and one step at a time.
    #[must_use]
    pub fn beside(self, other: Self) -> Self {
        Self {
            weights: self.weights.saturating_add(other.weights),
            workspace: self.workspace.max(other.workspace),
        }
    }

    /// With at least the working memory of `rows` rows of logits. They come after the layers, whose activations are free by then.
    #[must_use]
    pub fn with_logits(self, rows: usize, vocab_size: usize) -> Self {
        let logits = to_u64(rows.saturating_mul(vocab_size)).saturating_mul(4);
        Self {
            workspace: self.workspace.max(logits),
            ..self
        }
    }

    /// Everything except the KV cache.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.workspace)
    }

    /// Rejects a model that does not fit beside a KV cache of `kv_bytes`.
    ///
    /// # Errors
    /// `NotEnoughMemory`, with the figures and the flags that help.
    pub fn check(&self, kv_bytes: u64, available: u64) -> Result<(), LoadError> {
        let needed = self.total().saturating_add(kv_bytes);
        if needed <= available {
            return Ok(());
        }
        let estimate = format!(
            "weights take {}, the KV cache {} and a step {}: {} in all",
            Bytes(self.weights),
            Bytes(kv_bytes),
            Bytes(self.workspace),
            Bytes(needed),
        );
        let fix = if self.total() < available {
            format!(
                "--kv-cache-memory of at most {} fits",
                Bytes(available - self.total())
            )
        } else {
            "a smaller --max-num-batched-tokens makes a step smaller, and --quantize q4_k the weights, if the files are not quantized already; otherwise take a smaller model"
                .to_owned()
        };
        Err(LoadError::NotEnoughMemory {
            estimate,
            available,
            fix,
        })
    }
}

/// Bytes that a tensor takes once loaded.
fn kept_bytes(model: &dyn TensorFiles, options: &WeightOptions, tensor: &PlannedTensor) -> u64 {
    let elements = to_u64(tensor.shape.iter().product());
    let Some(part) = tensor.matrix else {
        return elements * 4;
    };
    let in_file = match model.tensor(&tensor.name) {
        Ok(Some(raw)) => raw.dtype,
        Ok(None) | Err(_) => WeightType::F32,
    };
    let row_len = tensor.shape.last().copied().unwrap_or(1);
    let is_candles = matches!(in_file, WeightType::Candle(_));
    let dtype = if !in_file.is_float() && (is_candles || options.device.is_cpu()) {
        type_without_kernels(in_file).unwrap_or(in_file)
    } else if options.device.is_cpu() {
        options.quantization.dtype_for(row_len, part).into()
    } else {
        return elements * to_u64(options.dtype.size_in_bytes());
    };
    let plain = to_u64(bytes_of(dtype, tensor.shape.iter().product()).unwrap_or(usize::MAX));
    if options.device.is_cpu() {
        repacked_bytes(dtype, plain)
    } else {
        plain
    }
}

/// The type that a matrix is requantized to if there are no kernels for its own.
fn type_without_kernels(dtype: WeightType) -> Option<WeightType> {
    let is_candles = matches!(dtype, WeightType::Candle(_));
    (!is_candles && quantized_kernels().is_none()).then_some(GgmlDType::Q8_0.into())
}

/// Bytes of a matrix on the CPU in the form that its products read. With our own kernels that form replaces the file's, and is
/// about as large.
fn repacked_bytes(dtype: WeightType, plain: u64) -> u64 {
    if dtype.is_float() || quantized_kernels().is_none() {
        return plain;
    }
    plain.saturating_add(plain / 16)
}

/// Bytes that can be allocated on a device; `None` if unknown.
///
/// On the CPU: the kernel's available memory, or what the control group leaves, whichever is less. Pages of mapped files do
/// not count as used, because the kernel can drop them.
#[must_use]
pub fn available_memory(device: &Device) -> Option<u64> {
    match device {
        Device::Cpu => available_in(Path::new("/")),
        Device::Cuda(_) => available_on_gpu(),
        Device::Metal(_) => None,
    }
}

#[cfg(feature = "cuda")]
fn available_on_gpu() -> Option<u64> {
    let (free, _) = candle_core::cuda_backend::cudarc::driver::result::mem_get_info().ok()?;
    Some(to_u64(free))
}

#[cfg(not(feature = "cuda"))]
fn available_on_gpu() -> Option<u64> {
    None
}

/// As [`available_memory`], with another root than `/`, for tests.
fn available_in(root: &Path) -> Option<u64> {
    let groups = ControlGroup::of_process(root, "self", "memory");
    let lefts = groups.iter().filter_map(left);
    lefts.chain(meminfo(root, "MemAvailable")).min()
}

/// The limit minus the usage, in which reclaimable file pages do not count; `None` without a limit.
fn left(group: &ControlGroup) -> Option<u64> {
    let (folder, usage, reclaimable) = match group {
        ControlGroup::First(folder) => (folder, "memory.usage_in_bytes", "total_inactive_file"),
        ControlGroup::Second(folder) => (folder, "memory.current", "inactive_file"),
    };
    let limit = group.memory_limit()?;
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let usage: u64 = read(usage)?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let reclaimable = stat
        .lines()
        .find_map(|line| line.strip_prefix(reclaimable)?.trim().parse::<u64>().ok());
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cores::tests::tree;

    const MEMINFO: (&str, &str) = (
        "proc/meminfo",
        "MemTotal:  9000 kB\nMemFree: 1 kB\nMemAvailable:   8000 kB\n",
    );

    #[test]
    fn without_a_limit_the_machine_decides() {
        let root = tree(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.current", "77\n"),
        ]);
        assert_eq!(available_in(root.path()), Some(8000 * 1024));
        assert_eq!(available_in(Path::new("/nowhere")), None);
    }

    #[test]
    fn a_limit_above_the_own_group_counts() {
        let root = tree(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/pod/box\n"),
            ("sys/fs/cgroup/pod/memory.max", "1000\n"),
            ("sys/fs/cgroup/pod/memory.current", "900\n"),
            (
                "sys/fs/cgroup/pod/memory.stat",
                "anon 5\ninactive_file 300\n",
            ),
            ("sys/fs/cgroup/pod/box/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/box/memory.current", "900\n"),
        ]);
        assert_eq!(available_in(root.path()), Some(400));
    }

    #[test]
    fn the_first_version_of_control_groups_is_read_too() {
        let root = tree(&[
            MEMINFO,
            ("proc/self/cgroup", "9:cpu:/x\n4:hugetlb,memory:/x\n0::/\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "5000\n"),
            ("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "1000\n"),
        ]);
        assert_eq!(available_in(root.path()), Some(4000));
    }

    #[test]
    fn a_step_has_room_for_the_logits_of_each_of_its_sequences() {
        let estimate = MemoryEstimate {
            weights: 1,
            workspace: WORKSPACE_BYTES,
        };
        assert_eq!(estimate.with_logits(256, 150_000), estimate);
        assert_eq!(estimate.with_logits(1024, 150_000).workspace, 614_400_000);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_flag_that_helps() {
        let estimate = MemoryEstimate {
            weights: 3 << 30,
            workspace: 1 << 30,
        };
        estimate.check(1 << 30, 5 << 30).unwrap();
        let error = estimate.check(2 << 30, 5 << 30).unwrap_err().to_string();
        assert_eq!(
            error,
            "not enough memory: weights take 3.0 GiB, the KV cache 2.0 GiB and a step 1.0 GiB: 6.0 GiB in all, and \
             5.0 GiB is available; --kv-cache-memory of at most 1.0 GiB fits"
        );
        let error = estimate.check(0, 1 << 30).unwrap_err().to_string();
        assert!(error.contains("--quantize q4_k"), "{error}");
    }
}
