//! Keys and values of every token in every layer, in KV blocks in main memory.
//!
//! The owners of blocks are tracked elsewhere. Here a block is a number, and a slot is `block * block_size + offset`.

use std::io;
use std::ops::Range;

use bytemuck::Pod;
use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::attention::AttentionHeads;
use crate::memory::Numbers;
use crate::simd::{LANES, widen};

/// The type of the numbers of a KV cache in main memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvNumbers {
    /// 32 bits.
    F32,
    /// 16 bits, at half the size.
    F16,
}

/// The shape of one token's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers with keys and values of their own.
    pub num_layers: usize,
    /// Heads of keys and values in a layer.
    pub num_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// The keys and values of all layers, block after block: `[blocks, layers, kv_heads, 2, head_dim * block_size]`. So the touched
/// memory grows with the blocks in use.
#[derive(Debug)]
pub struct HostKv(AnyKv);

#[derive(Debug)]
enum AnyKv {
    F32(TypedKv<f32>),
    F16(TypedKv<f16>),
}

impl HostKv {
    /// Creates an empty cache, which takes no memory before it is written; `block_size` is the tokens per KV block, > 0.
    ///
    /// # Errors
    /// The system is out of memory.
    pub fn try_new(
        numbers: KvNumbers,
        shape: KvShape,
        num_blocks: usize,
        block_size: usize,
    ) -> io::Result<Self> {
        let shape = Shape {
            num_layers: shape.num_layers,
            num_heads: shape.num_heads,
            head_dim: shape.head_dim,
            block_size,
        };
        Ok(Self(match numbers {
            KvNumbers::F32 => AnyKv::F32(TypedKv::try_new(shape, num_blocks)?),
            KvNumbers::F16 => AnyKv::F16(TypedKv::try_new(shape, num_blocks)?),
        }))
    }

    /// The bytes of a block; `None` if there is no such block.
    #[must_use]
    pub fn block(&self, block: usize) -> Option<&[u8]> {
        match &self.0 {
            AnyKv::F32(kv) => kv.block(block),
            AnyKv::F16(kv) => kv.block(block),
        }
    }

    /// The mutable bytes of a block. Any bytes are valid numbers.
    pub fn block_mut(&mut self, block: usize) -> Option<&mut [u8]> {
        match &mut self.0 {
            AnyKv::F32(kv) => kv.block_mut(block),
            AnyKv::F16(kv) => kv.block_mut(block),
        }
    }

    /// The view of one layer, to read and write.
    ///
    /// # Panics
    /// There is no such layer.
    pub fn layer(&mut self, layer: usize) -> HostLayer<'_> {
        HostLayer(match &mut self.0 {
            AnyKv::F32(kv) => AnyLayer::F32(kv.layer(layer)),
            AnyKv::F16(kv) => AnyLayer::F16(kv.layer(layer)),
        })
    }
}

/// One layer's keys and values.
#[derive(Debug)]
pub struct HostLayer<'a>(pub(crate) AnyLayer<'a>);

#[derive(Debug)]
pub(crate) enum AnyLayer<'a> {
    F32(TypedLayer<'a, f32>),
    F16(TypedLayer<'a, f16>),
}

/// A number type of a KV cache.
pub(crate) trait KvNumber: Pod + Send + Sync + std::fmt::Debug {
    /// Rounds `from` to `to`, which has the same length.
    fn round(from: &[f32], to: &mut [Self]);

    /// Converts sixteen numbers to f32.
    fn lanes<const FMA: bool>(numbers: &[Self; LANES]) -> [f32; LANES];
}

impl KvNumber for f32 {
    fn round(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    #[inline(always)]
    fn lanes<const FMA: bool>(numbers: &[Self; LANES]) -> [f32; LANES] {
        *numbers
    }
}

impl KvNumber for f16 {
    fn round(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }

    #[inline(always)]
    fn lanes<const FMA: bool>(numbers: &[Self; LANES]) -> [f32; LANES] {
        widen::<FMA>(numbers)
    }
}

/// As [`HostKv`].
#[derive(Debug)]
struct TypedKv<T> {
    numbers: Numbers<T>,
    shape: Shape,
}

/// The sizes from which offsets are computed.
#[derive(Debug, Clone, Copy)]
struct Shape {
    num_layers: usize,
    num_heads: usize,
    head_dim: usize,
    block_size: usize,
}

impl Shape {
    /// The length of a block's keys of one head; its values have the same length.
    fn head_len(self) -> usize {
        self.head_dim * self.block_size
    }

    /// The length of a block's keys and values in one layer.
    fn layer_len(self) -> usize {
        self.num_heads * 2 * self.head_len()
    }
}

impl<T: KvNumber> TypedKv<T> {
    fn try_new(shape: Shape, num_blocks: usize) -> io::Result<Self> {
        let Shape {
            num_layers,
            num_heads,
            head_dim,
            block_size,
        } = shape;
        let factors = [num_layers, num_heads, 2, head_dim, block_size];
        let len = factors.into_iter().try_fold(num_blocks, usize::checked_mul);
        Ok(Self {
            numbers: Numbers::zeroed(len.ok_or(io::ErrorKind::OutOfMemory)?)?,
            shape,
        })
    }

    fn block(&self, block: usize) -> Option<&[u8]> {
        let numbers = self.numbers.get(self.places(block)?)?;
        Some(bytemuck::cast_slice(numbers))
    }

    fn block_mut(&mut self, block: usize) -> Option<&mut [u8]> {
        let places = self.places(block)?;
        let numbers = self.numbers.get_mut(places)?;
        Some(bytemuck::cast_slice_mut(numbers))
    }

    fn places(&self, block: usize) -> Option<Range<usize>> {
        let len = self.shape.num_layers * self.shape.layer_len();
        let start = block.checked_mul(len)?;
        Some(start..start.checked_add(len)?)
    }

    fn layer(&mut self, layer: usize) -> TypedLayer<'_, T> {
        let layers = self.shape.num_layers;
        assert!(layer < layers, "layer {layer} of a KV cache of {layers}");
        TypedLayer {
            numbers: &mut self.numbers,
            first: layer * self.shape.layer_len(),
            shape: self.shape,
        }
    }
}

/// As [`HostLayer`]. In each block and head, keys are `[head_dim, block_size]` (so that one vector holds one
/// dimension of several tokens), and values `[block_size, head_dim]`.
#[derive(Debug)]
pub(crate) struct TypedLayer<'a, T> {
    numbers: &'a mut [T],
    /// The layer's offset in a block.
    first: usize,
    shape: Shape,
}

impl<T: KvNumber> TypedLayer<'_, T> {
    pub(crate) fn block_size(&self) -> usize {
        self.shape.block_size
    }

    /// Checks that it has the keys and values of these heads.
    pub(crate) fn check(&self, heads: &AttentionHeads) {
        assert_eq!(
            (self.shape.num_heads, self.shape.head_dim),
            (heads.num_kv_heads, heads.head_dim),
            "number and width of the KV cache's heads"
        );
    }

    /// Stores a token's key of one head.
    pub(crate) fn set_key(&mut self, slot: usize, head: usize, key: &[T]) {
        let Shape { block_size, .. } = self.shape;
        let start = self.keys_start(slot / block_size, head) + slot % block_size;
        for (to, &from) in self.numbers[start..]
            .iter_mut()
            .step_by(block_size)
            .zip(key)
        {
            *to = from;
        }
    }

    /// Stores a token's value of one head.
    pub(crate) fn set_value(&mut self, slot: usize, head: usize, value: &[T]) {
        let Shape {
            block_size,
            head_dim,
            ..
        } = self.shape;
        let start = self.values_start(slot / block_size, head) + slot % block_size * head_dim;
        self.numbers[start..start + head_dim].copy_from_slice(value);
    }

    /// A block's keys of one head, `[head_dim, block_size]`.
    pub(crate) fn keys(&self, block: usize, head: usize) -> &[T] {
        let start = self.keys_start(block, head);
        &self.numbers[start..start + self.shape.head_len()]
    }

    /// A block's values of one head, `[block_size, head_dim]`.
    pub(crate) fn values(&self, block: usize, head: usize) -> &[T] {
        let start = self.values_start(block, head);
        &self.numbers[start..start + self.shape.head_len()]
    }

    fn keys_start(&self, block: usize, head: usize) -> usize {
        let shape = self.shape;
        let block = block * shape.num_layers * shape.layer_len();
        block + self.first + head * 2 * shape.head_len()
    }

    fn values_start(&self, block: usize, head: usize) -> usize {
        self.keys_start(block, head) + self.shape.head_len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_larger_than_the_addresses_is_out_of_memory() {
        let shape = KvShape {
            num_layers: 2,
            num_heads: 1 << 40,
            head_dim: 1 << 40,
        };
        let refused = HostKv::try_new(KvNumbers::F16, shape, 1, 16).map(|_| ());
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::OutOfMemory);
    }
}
