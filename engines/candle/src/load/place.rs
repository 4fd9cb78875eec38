//! [`Place`]: where a model's files have a tensor of the decoder. It may have another name there, be a part of a larger tensor,
//! or have its rows in another order.

use super::tensors::{HeadRows, RawTensor, RowOrder};
use crate::model::config::ModelConfig;

/// The place of a tensor in the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// The name in the files, of the tensor or of the larger one.
    pub(crate) name: String,
    pub(crate) rows: RowOrder,
    /// `None` if the tensor is a whole one.
    pub(crate) part: Option<PartOf>,
}

/// A tensor that consists of some rows of a larger one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartOf {
    /// The larger one's shape.
    pub(crate) whole: Vec<usize>,
    /// The index of its first row in the larger one, over all dimensions but the last; in a vector, of its first number.
    pub(crate) first: usize,
    /// The part's shape.
    pub(crate) shape: Vec<usize>,
    /// The distance between its rows in the larger one; 1 if they are consecutive.
    pub(crate) step: usize,
}

impl Place {
    /// A whole tensor with rows in the model's order.
    pub(crate) fn whole(name: String) -> Self {
        Self {
            name,
            rows: RowOrder::Halves,
            part: None,
        }
    }

    /// Cuts the tensor out of what the file has under the place's name.
    ///
    /// # Errors
    /// The shape that the larger tensor should have.
    pub(crate) fn cut<'a>(&self, raw: RawTensor<'a>) -> Result<RawTensor<'a>, Vec<usize>> {
        let mut raw = match &self.part {
            None => raw,
            Some(part) if sizes(&raw.shape) == sizes(&part.whole) => {
                raw.part(part.first, &part.shape, part.step)
            }
            Some(part) => return Err(part.whole.clone()),
        };
        if let Some(part) = self.part.as_ref().filter(|part| part.step > 1) {
            raw.rows = RowOrder::Every(part.step);
            return Ok(raw);
        }
        // A tensor whose rows are not whole heads has the wrong shape, which the later comparison reports.
        raw.rows = match self.rows {
            RowOrder::Heads(HeadRows { head_dim, .. })
                if !raw
                    .shape
                    .first()
                    .is_some_and(|rows| rows.is_multiple_of(head_dim)) =>
            {
                RowOrder::Halves
            }
            rows @ (RowOrder::Halves | RowOrder::Heads(_) | RowOrder::Every(_)) => rows,
        };
        Ok(raw)
    }
}

/// A shape without leading ones, which some files leave out.
fn sizes(shape: &[usize]) -> &[usize] {
    let ones = shape.iter().take_while(|size| **size == 1).count();
    shape.get(ones..).unwrap_or_default()
}

/// The order of a tensor's rows in files. Queries and keys have heads; `is_paired` tells that their rows rotate in pairs though
/// those of the family's checkouts do not.
pub(crate) fn row_order(name: &str, config: &ModelConfig, is_paired: bool) -> RowOrder {
    let is_rotated = [".q_proj.", ".k_proj."]
        .iter()
        .any(|part| name.contains(part));
    if !is_rotated {
        return RowOrder::Halves;
    }
    let rows = HeadRows {
        head_dim: config.head_dim,
        rotary_dim: config.rope.rotary_dim,
        is_paired: is_paired || config.rope.is_paired,
    };
    rows.order()
}

/// The names of matrices that combine several projections of one input, one below the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fused {
    /// Queries, keys and values.
    pub(crate) qkv: &'static str,
    /// Both products of the feed-forward block's input.
    pub(crate) gate_up: &'static str,
}

impl Fused {
    /// The combined matrix that contains a module, and the module's rows in it; `None` for a module that is not fused.
    pub(crate) fn part(self, module: &str, config: &ModelConfig) -> Option<(&'static str, PartOf)> {
        let queries = config.num_heads * config.head_dim;
        let keys = config.num_kv_heads * config.head_dim;
        let wide = config.intermediate_size;
        let (own, first, rows, all) = match module {
            "self_attn.q_proj" => (self.qkv, 0, queries, queries + 2 * keys),
            "self_attn.k_proj" => (self.qkv, queries, keys, queries + 2 * keys),
            "self_attn.v_proj" => (self.qkv, queries + keys, keys, queries + 2 * keys),
            "mlp.gate_proj" => (self.gate_up, 0, wide, 2 * wide),
            "mlp.up_proj" => (self.gate_up, wide, wide, 2 * wide),
            _ => return None,
        };
        let part = PartOf {
            whole: vec![all, config.hidden_size],
            first,
            shape: vec![rows, config.hidden_size],
            step: 1,
        };
        Some((own, part))
    }
}

/// Splits `model.layers.LAYER.MODULE.KIND` into layer, module and kind.
pub(crate) fn of_layer(name: &str) -> Option<(&str, &str, &str)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    Some((layer, module, kind))
}

/// The parts of the name of an expert's matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpertName<'a> {
    /// The layer's number.
    pub(crate) layer: &'a str,
    /// The expert's number.
    pub(crate) expert: usize,
    /// `gate_proj`, `up_proj` or `down_proj`.
    pub(crate) projection: &'a str,
    /// `weight` or `bias`.
    pub(crate) kind: &'a str,
}

impl<'a> ExpertName<'a> {
    /// Parses `model.layers.LAYER.mlp.experts.EXPERT.PROJECTION.KIND`; `None` for other names.
    pub(crate) fn parse(name: &'a str) -> Option<Self> {
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (expert, rest) = rest.strip_prefix("mlp.experts.")?.split_once('.')?;
        let (projection, kind) = rest.split_once('.')?;
        Some(Self {
            layer,
            expert: expert.parse().ok()?,
            projection,
            kind,
        })
    }
}
