//! Keys and values of every token in every layer, in KV blocks.
//!
//! Which sequence owns which block is the scheduler's business; here a block is a number, and a slot is
//! `block * block_size + offset`.

use candle_core::{DType, Device, Result, Tensor};
use half::f16;
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;

use super::attention::by_kernels;
use super::config::ModelConfig;
use super::simd::{LANES, widen};

/// The shape of a KV cache.
#[derive(Debug, Clone, PartialEq)]
pub struct KvCacheSpec {
    /// KV blocks.
    pub num_blocks: usize,
    /// Tokens per KV block, > 0.
    pub block_size: usize,
    /// What numbers are kept in: F32 or F16 on the CPU, the compute type on a GPU.
    pub dtype: DType,
}

impl KvCacheSpec {
    /// Bytes of one KV block in all layers together.
    #[must_use]
    pub fn block_bytes(&self, config: &ModelConfig) -> usize {
        2 * config.num_layers
            * config.num_kv_heads
            * config.head_dim
            * self.block_size
            * self.dtype.size_in_bytes()
    }
}

/// The KV cache of a model.
#[derive(Debug)]
pub struct KvCache {
    spec: KvCacheSpec,
    layers: Vec<LayerKv>,
}

/// One layer's keys and values.
#[derive(Debug)]
pub(super) enum LayerKv {
    /// In main memory.
    HostF32(HostKv<f32>),
    /// In main memory, at half the size.
    HostF16(HostKv<f16>),
    /// Tensors, `[slots, kv_heads * head_dim]`.
    Device {
        keys: Tensor,
        values: Tensor,
        block_size: usize,
        /// Whether kernels of our own take them, and not candle's operations.
        has_kernels: bool,
    },
}

impl KvCache {
    /// An empty cache for `config` on `device`.
    ///
    /// # Errors
    /// The type is not one that the device computes with, or there is not enough memory on the device.
    pub fn try_new(config: &ModelConfig, spec: KvCacheSpec, device: &Device) -> Result<Self> {
        let layer = || match (device.is_cpu(), spec.dtype) {
            (true, DType::F32) => Ok(LayerKv::HostF32(HostKv::new(config, &spec))),
            (true, DType::F16) => Ok(LayerKv::HostF16(HostKv::new(config, &spec))),
            (true, other) => {
                candle_core::bail!("a KV cache on the CPU is f32 or f16, not {other:?}")
            }
            (false, dtype) => {
                let has_kernels = by_kernels::cover(device, dtype, config.head_dim);
                device_layer(config, &spec, device, has_kernels)
            }
        };
        let layers = (0..config.num_layers)
            .map(|_| layer())
            .collect::<Result<_>>()?;
        Ok(Self { spec, layers })
    }

    /// As for a GPU, on any device: the path of plain candle operations, or that of the kernels.
    #[cfg(test)]
    pub(super) fn try_new_as_on_gpu(
        config: &ModelConfig,
        spec: KvCacheSpec,
        device: &Device,
        has_kernels: bool,
    ) -> Result<Self> {
        let layers = (0..config.num_layers)
            .map(|_| device_layer(config, &spec, device, has_kernels))
            .collect::<Result<_>>()?;
        Ok(Self { spec, layers })
    }

    /// Where it is, if kernels of our own work on it.
    pub(super) fn device_with_kernels(&self) -> Option<&Device> {
        match self.layers.first() {
            Some(LayerKv::Device {
                keys,
                has_kernels: true,
                ..
            }) => Some(keys.device()),
            Some(LayerKv::Device { .. } | LayerKv::HostF32(_) | LayerKv::HostF16(_)) | None => None,
        }
    }

    /// Fills all slots, as if others had used them.
    #[cfg(test)]
    pub(super) fn fill(&mut self, value: f32) {
        for layer in &mut self.layers {
            match layer {
                LayerKv::HostF32(kv) => kv.fill(value),
                LayerKv::HostF16(kv) => kv.fill(f16::from_f32(value)),
                LayerKv::Device { .. } => unreachable!("tests fill caches in main memory"),
            }
        }
    }

    /// Its shape.
    #[must_use]
    pub fn spec(&self) -> &KvCacheSpec {
        &self.spec
    }

    pub(super) fn layer(&mut self, layer: usize) -> &mut LayerKv {
        &mut self.layers[layer]
    }

    pub(super) fn num_layers(&self) -> usize {
        self.layers.len()
    }
}

fn device_layer(
    config: &ModelConfig,
    spec: &KvCacheSpec,
    device: &Device,
    has_kernels: bool,
) -> Result<LayerKv> {
    let shape = (
        spec.num_blocks * spec.block_size,
        config.num_kv_heads * config.head_dim,
    );
    Ok(LayerKv::Device {
        keys: Tensor::zeros(shape, spec.dtype, device)?,
        values: Tensor::zeros(shape, spec.dtype, device)?,
        block_size: spec.block_size,
        has_kernels,
    })
}

/// Numbers of a KV cache in main memory.
pub(super) trait KvNumber: Copy + Send + Sync + std::fmt::Debug {
    const ZERO: Self;

    /// So many zeros, which take no memory before they are written.
    fn zeros(len: usize) -> Vec<Self>;

    /// Rounds `from` to `to`, which is as long.
    fn round(from: &[f32], to: &mut [Self]);

    /// Sixteen numbers in f32.
    fn lanes<const FMA: bool>(numbers: &[Self; LANES]) -> [f32; LANES];
}

impl KvNumber for f32 {
    const ZERO: Self = 0.0;

    fn zeros(len: usize) -> Vec<Self> {
        vec![0.0; len]
    }

    fn round(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    #[inline(always)]
    fn lanes<const FMA: bool>(numbers: &[Self; LANES]) -> [f32; LANES] {
        *numbers
    }
}

impl KvNumber for f16 {
    const ZERO: Self = Self::ZERO;

    fn zeros(len: usize) -> Vec<Self> {
        // The library writes zeros of types that are not its own.
        vec![0u16; len].reinterpret_into()
    }

    fn round(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }

    #[inline(always)]
    fn lanes<const FMA: bool>(numbers: &[Self; LANES]) -> [f32; LANES] {
        widen::<FMA>(numbers)
    }
}

/// Keys and values in main memory: for each block and each head in it, the keys `[head_dim, block_size]` (so that one
/// vector holds one dimension of several tokens), and the values `[block_size, head_dim]`.
#[derive(Debug)]
pub(super) struct HostKv<T> {
    keys: Vec<T>,
    values: Vec<T>,
    num_heads: usize,
    head_dim: usize,
    block_size: usize,
}

impl<T: KvNumber> HostKv<T> {
    fn new(config: &ModelConfig, spec: &KvCacheSpec) -> Self {
        let len = spec.num_blocks * spec.block_size * config.num_kv_heads * config.head_dim;
        Self {
            keys: T::zeros(len),
            values: T::zeros(len),
            num_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            block_size: spec.block_size,
        }
    }

    #[cfg(test)]
    fn fill(&mut self, value: T) {
        self.keys.fill(value);
        self.values.fill(value);
    }

    pub(super) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Stores a token's key of one head.
    pub(super) fn set_key(&mut self, slot: usize, head: usize, key: &[T]) {
        let start = self.start(slot / self.block_size, head) + slot % self.block_size;
        for (to, &from) in self.keys[start..]
            .iter_mut()
            .step_by(self.block_size)
            .zip(key)
        {
            *to = from;
        }
    }

    /// Stores a token's value of one head.
    pub(super) fn set_value(&mut self, slot: usize, head: usize, value: &[T]) {
        let start =
            self.start(slot / self.block_size, head) + slot % self.block_size * self.head_dim;
        self.values[start..start + self.head_dim].copy_from_slice(value);
    }

    /// A block's keys of one head, `[head_dim, block_size]`.
    pub(super) fn keys(&self, block: usize, head: usize) -> &[T] {
        let start = self.start(block, head);
        &self.keys[start..start + self.head_dim * self.block_size]
    }

    /// A block's values of one head, `[block_size, head_dim]`.
    pub(super) fn values(&self, block: usize, head: usize) -> &[T] {
        let start = self.start(block, head);
        &self.values[start..start + self.head_dim * self.block_size]
    }

    fn start(&self, block: usize, head: usize) -> usize {
        (block * self.num_heads + head) * self.head_dim * self.block_size
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;
    use crate::synthetic::SyntheticSize;

    fn resident_bytes() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kib = line.unwrap().split_whitespace().nth(1).unwrap();
        kib.parse::<u64>().unwrap() * 1024
    }

    #[test]
    fn an_unused_cache_takes_no_memory() {
        let config = SyntheticSize::M100.config();
        for dtype in [DType::F16, DType::F32] {
            let mut spec = KvCacheSpec {
                num_blocks: 1,
                block_size: 16,
                dtype,
            };
            let size = 4 << 30;
            spec.num_blocks = size / spec.block_bytes(&config);
            let before = resident_bytes();
            let cache = KvCache::try_new(&config, spec, &Device::Cpu).unwrap();
            // Other tests run in this process meanwhile.
            let grown = resident_bytes().saturating_sub(before);
            assert!(grown < 3 << 30, "{dtype:?}: {grown} bytes");
            drop(cache);
        }
    }
}
