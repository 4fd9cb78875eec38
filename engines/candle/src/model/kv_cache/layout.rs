//! [`KvLayout`]: the layout of a KV block's bytes.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{KvCacheSpec, KvShape};

/// The layout of a KV block's bytes in main memory. Instances with equal layouts can exchange blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayout {
    /// The order of the numbers, and of the bytes in each number.
    pub arrangement: String,
    /// The type of the numbers.
    pub dtype: String,
    /// Layers of the model.
    pub num_layers: usize,
    /// Heads of keys and values in a layer.
    pub num_kv_heads: usize,
    /// Dimensions per head.
    pub head_dim: usize,
    /// Tokens per block, > 0.
    pub block_size: usize,
    /// Bytes per number.
    pub number_bytes: usize,
}

/// As [`HostKv`](genset_kernels::HostKv) says: `[layers, kv_heads, 2, head_dim * block_size]`.
const HOST: &str = if cfg!(target_endian = "little") {
    "host-1-little"
} else {
    "host-1-big"
};

impl KvLayout {
    pub(super) fn of_host(kept: KvShape, spec: &KvCacheSpec) -> Self {
        let dtype = spec.dtype;
        Self {
            arrangement: HOST.to_owned(),
            dtype: dtype.as_str().to_owned(),
            num_layers: kept.num_layers,
            num_kv_heads: kept.num_heads,
            head_dim: kept.head_dim,
            block_size: spec.block_size,
            number_bytes: dtype.size_in_bytes(),
        }
    }

    /// Bytes of a block over all layers.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        [
            2,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            self.number_bytes,
        ]
        .into_iter()
        .fold(1, usize::saturating_mul)
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {}, {} layers, {} heads of {}, {} tokens a block",
            self.arrangement,
            self.dtype,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.block_size
        )
    }
}
