//! Keys and values of every token in every layer, in KV blocks.
//!
//! The scheduler tracks the owners of blocks. Here a block is a number, and a slot is `block * block_size + offset`.

mod layout;

use candle_core::{DType, Device, Result, Tensor};
pub(super) use genset_kernels::KvShape;
use genset_kernels::{HostKv, HostLayer, KvNumbers};

pub use self::layout::KvLayout;
use super::attention::by_kernels;
use super::config::ModelConfig;

/// The shape of a KV cache.
#[derive(Debug, Clone, PartialEq)]
pub struct KvCacheSpec {
    /// KV blocks.
    pub num_blocks: usize,
    /// Tokens per KV block, > 0.
    pub block_size: usize,
    /// The type of the numbers: F32 or F16 on the CPU, the compute type on a GPU.
    pub dtype: DType,
}

impl From<&ModelConfig> for KvShape {
    fn from(config: &ModelConfig) -> Self {
        Self {
            num_layers: config.num_layers,
            num_heads: config.num_kv_heads,
            head_dim: config.head_dim,
        }
    }
}

/// The KV cache of a model.
#[derive(Debug)]
pub struct KvCache {
    spec: KvCacheSpec,
    layers: Layers,
    num_layers: usize,
    /// `Some` for a cache in main memory.
    layout: Option<KvLayout>,
}

/// The keys and values of all layers.
#[derive(Debug)]
enum Layers {
    Host(HostKv),
    Device(Vec<DeviceKv>),
}

/// One layer's keys and values.
#[derive(Debug)]
pub(super) enum LayerKv<'a> {
    /// In main memory.
    Host(HostLayer<'a>),
    /// In candle tensors.
    Device(&'a mut DeviceKv),
}

/// One layer's keys and values as tensors, `[slots, kv_heads * head_dim]`.
#[derive(Debug)]
pub(super) struct DeviceKv {
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
    pub(super) block_size: usize,
    /// Whether our own kernels use them, instead of candle's operations.
    has_kernels: bool,
}

impl KvCache {
    /// An empty cache for `config` on `device`.
    ///
    /// # Errors
    /// The device does not support the type, or there is not enough memory.
    pub fn try_new(config: &ModelConfig, spec: KvCacheSpec, device: &Device) -> Result<Self> {
        let has_kernels = by_kernels::cover(device, spec.dtype, config.head_dim);
        Self::of_shape(config.into(), spec, device, has_kernels)
    }

    /// Creates a cache, which our own kernels use on a GPU if `has_kernels`. They do not support bidirectional attention, for which
    /// all layers of a model share one layer in turn.
    pub(super) fn of_shape(
        shape: KvShape,
        spec: KvCacheSpec,
        device: &Device,
        has_kernels: bool,
    ) -> Result<Self> {
        let layers = match (device.is_cpu(), spec.dtype) {
            (true, DType::F32) => host_layers(KvNumbers::F32, shape, &spec)?,
            (true, DType::F16) => host_layers(KvNumbers::F16, shape, &spec)?,
            (true, other) => {
                candle_core::bail!("a KV cache on the CPU is f32 or f16, not {other:?}")
            }
            (false, _) => device_layers(shape, &spec, device, has_kernels)?,
        };
        let layout = match &layers {
            Layers::Host(_) => Some(KvLayout::of_host(shape, &spec)),
            Layers::Device(_) => None,
        };
        Ok(Self {
            spec,
            layers,
            num_layers: shape.num_layers,
            layout,
        })
    }

    /// Creates a cache as for a GPU, on any device: for plain candle operations, or for the kernels.
    #[cfg(test)]
    pub(super) fn try_new_as_on_gpu(
        shape: impl Into<KvShape>,
        spec: KvCacheSpec,
        device: &Device,
        has_kernels: bool,
    ) -> Result<Self> {
        let shape = shape.into();
        Ok(Self {
            layers: device_layers(shape, &spec, device, has_kernels)?,
            spec,
            num_layers: shape.num_layers,
            layout: None,
        })
    }

    /// The layout of its blocks' bytes; `None` if they are not in main memory.
    #[must_use]
    pub fn layout(&self) -> Option<&KvLayout> {
        self.layout.as_ref()
    }

    /// The bytes of a block, in main memory.
    #[must_use]
    pub fn block(&self, block: usize) -> Option<&[u8]> {
        match &self.layers {
            Layers::Host(kv) => kv.block(block),
            Layers::Device(_) => None,
        }
    }

    /// The bytes of a block, in main memory, mutable.
    pub fn block_mut(&mut self, block: usize) -> Option<&mut [u8]> {
        match &mut self.layers {
            Layers::Host(kv) => kv.block_mut(block),
            Layers::Device(_) => None,
        }
    }

    /// Its device, if our own kernels work on it.
    pub(super) fn device_with_kernels(&self) -> Option<&Device> {
        let Layers::Device(layers) = &self.layers else {
            return None;
        };
        let first = layers.first().filter(|layer| layer.has_kernels)?;
        Some(first.keys.device())
    }

    /// Fills all slots, as if they had been used before.
    #[cfg(test)]
    pub(super) fn fill(&mut self, value: f32) {
        use half::f16;

        let is_f32 = self.spec.dtype == DType::F32;
        for block in 0..self.spec.num_blocks {
            let Some(bytes) = self.block_mut(block) else {
                unreachable!("tests fill caches in main memory");
            };
            if is_f32 {
                bytemuck::cast_slice_mut::<u8, f32>(bytes).fill(value);
            } else {
                bytemuck::cast_slice_mut::<u8, f16>(bytes).fill(f16::from_f32(value));
            }
        }
    }

    /// Its shape.
    #[must_use]
    pub fn spec(&self) -> &KvCacheSpec {
        &self.spec
    }

    pub(super) fn layer(&mut self, layer: usize) -> LayerKv<'_> {
        match &mut self.layers {
            Layers::Host(kv) => LayerKv::Host(kv.layer(layer)),
            Layers::Device(layers) => LayerKv::Device(&mut layers[layer]),
        }
    }

    pub(super) fn num_layers(&self) -> usize {
        self.num_layers
    }
}

fn host_layers(numbers: KvNumbers, shape: KvShape, spec: &KvCacheSpec) -> Result<Layers> {
    let kv = HostKv::try_new(numbers, shape, spec.num_blocks, spec.block_size)?;
    Ok(Layers::Host(kv))
}

fn device_layers(
    kept: KvShape,
    spec: &KvCacheSpec,
    device: &Device,
    has_kernels: bool,
) -> Result<Layers> {
    let shape = (
        spec.num_blocks * spec.block_size,
        kept.num_heads * kept.head_dim,
    );
    let layer = || {
        Ok(DeviceKv {
            keys: Tensor::zeros(shape, spec.dtype, device)?,
            values: Tensor::zeros(shape, spec.dtype, device)?,
            block_size: spec.block_size,
            has_kernels,
        })
    };
    let layers = (0..kept.num_layers)
        .map(|_| layer())
        .collect::<Result<_>>()?;
    Ok(Layers::Device(layers))
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use genset_devtools::synthetic::SyntheticSize;

    use super::*;
    use crate::load::kv_bytes_per_block;
    use crate::load::tests::config_of;

    fn resident_bytes() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kib = line.unwrap().split_whitespace().nth(1).unwrap();
        kib.parse::<u64>().unwrap() * 1024
    }

    #[test]
    fn an_unused_cache_takes_no_memory() {
        let config = config_of(SyntheticSize::M100);
        for dtype in [DType::F16, DType::F32] {
            let block = kv_bytes_per_block(&config, 16, dtype.size_in_bytes());
            let spec = KvCacheSpec {
                num_blocks: usize::try_from((4 << 30) / block).unwrap(),
                block_size: 16,
                dtype,
            };
            let before = resident_bytes();
            let cache = KvCache::try_new(&config, spec, &Device::Cpu).unwrap();
            // Other tests run in this process at the same time.
            let grown = resident_bytes().saturating_sub(before);
            assert!(grown < 3 << 30, "{dtype:?}: {grown} bytes");
            drop(cache);
        }
    }
}
