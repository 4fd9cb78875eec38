//! Keys and values in main memory.

use std::io;
use std::ops::Range;

use bytemuck::Pod;
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::{KvCacheSpec, KvShape};
use crate::model::memory::Numbers;
use crate::model::simd::{LANES, widen};

/// A number type of a KV cache in main memory.
pub(in crate::model) trait KvNumber: Pod + Send + Sync + std::fmt::Debug {
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

/// The keys and values of all layers, block after block: `[blocks, layers, kv_heads, 2, head_dim * block_size]`. So the touched
/// memory grows with the blocks in use.
#[derive(Debug)]
pub(super) struct HostKv<T> {
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

impl<T: KvNumber> HostKv<T> {
    /// Creates an empty cache, which takes no memory before it is written.
    ///
    /// # Errors
    /// The system is out of memory.
    pub(super) fn try_new(kept: KvShape, spec: &KvCacheSpec) -> io::Result<Self> {
        let shape = Shape {
            num_layers: kept.num_layers,
            num_heads: kept.num_heads,
            head_dim: kept.head_dim,
            block_size: spec.block_size,
        };
        let len = (shape.num_layers * shape.layer_len()).checked_mul(spec.num_blocks);
        Ok(Self {
            numbers: Numbers::zeroed(len.ok_or(io::ErrorKind::OutOfMemory)?)?,
            shape,
        })
    }

    /// The bytes of a block.
    pub(super) fn block(&self, block: usize) -> Option<&[u8]> {
        let numbers = self.numbers.get(self.places(block)?)?;
        Some(bytemuck::cast_slice(numbers))
    }

    /// The mutable bytes of a block. Any bytes are valid numbers.
    pub(super) fn block_mut(&mut self, block: usize) -> Option<&mut [u8]> {
        let places = self.places(block)?;
        let numbers = self.numbers.get_mut(places)?;
        Some(bytemuck::cast_slice_mut(numbers))
    }

    fn places(&self, block: usize) -> Option<Range<usize>> {
        let len = self.shape.num_layers * self.shape.layer_len();
        let start = block.checked_mul(len)?;
        Some(start..start.checked_add(len)?)
    }

    #[cfg(test)]
    pub(super) fn fill(&mut self, value: T) {
        self.numbers.fill(value);
    }

    /// The view of one layer, to read and write.
    pub(super) fn layer(&mut self, layer: usize) -> HostLayer<'_, T> {
        HostLayer {
            numbers: &mut self.numbers,
            first: layer * self.shape.layer_len(),
            shape: self.shape,
        }
    }
}

/// One layer's keys and values. In each block and head, keys are `[head_dim, block_size]` (so that one vector holds one
/// dimension of several tokens), and values `[block_size, head_dim]`.
#[derive(Debug)]
pub(in crate::model) struct HostLayer<'a, T> {
    numbers: &'a mut [T],
    /// The layer's offset in a block.
    first: usize,
    shape: Shape,
}

impl<T: KvNumber> HostLayer<'_, T> {
    pub(in crate::model) fn block_size(&self) -> usize {
        self.shape.block_size
    }

    /// Stores a token's key of one head.
    pub(in crate::model) fn set_key(&mut self, slot: usize, head: usize, key: &[T]) {
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
    pub(in crate::model) fn set_value(&mut self, slot: usize, head: usize, value: &[T]) {
        let Shape {
            block_size,
            head_dim,
            ..
        } = self.shape;
        let start = self.values_start(slot / block_size, head) + slot % block_size * head_dim;
        self.numbers[start..start + head_dim].copy_from_slice(value);
    }

    /// A block's keys of one head, `[head_dim, block_size]`.
    pub(in crate::model) fn keys(&self, block: usize, head: usize) -> &[T] {
        let start = self.keys_start(block, head);
        &self.numbers[start..start + self.shape.head_len()]
    }

    /// A block's values of one head, `[block_size, head_dim]`.
    pub(in crate::model) fn values(&self, block: usize, head: usize) -> &[T] {
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
