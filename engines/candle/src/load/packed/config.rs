//! Reads [`Scheme`] from the `quantization_config` of a `config.json`.

use std::path::Path;

use serde_json::Value;

use super::Scheme;
use super::int4::Packing;
use crate::error::LoadError;

const FIELD: &str = "quantization_config";
/// The default of `weight_block_size`: rows and columns that share a scale.
const USUAL_BLOCK: [usize; 2] = [128, 128];
/// More columns per group, or rows per block, than any matrix has.
const MAX_SIZE: usize = 1 << 24;

const FIX: &str = "GPTQ, AWQ and compressed-tensors of 4 bits, FP8, and gpt-oss's MXFP4 are; take such a checkout, the \
                   model's unquantized weights, or a GGUF file";
const FIX_BITS: &str =
    "4 is; take such a checkout, a GGUF file, or the unquantized weights with --quantize";
const FIX_STATIC: &str = "it was calibrated for activations that are rounded by fixed scales, and here they are not \
                          rounded; take a checkout with dynamic ones, or the model's unquantized weights";
const FIX_TRANSFORMS: &str = "weight_input and weight_output are, because the stored weights include them; take another \
                              checkout, or the model's unquantized weights";
const FIX_LAYERS: &str = "all quantized layers must have the same form; take another checkout";

/// Reads the value of `quantization_config`; errors name `path`.
///
/// # Errors
/// Something is not supported, or a size is out of its range.
pub(crate) fn read(path: &Path, value: &Value) -> Result<Scheme, LoadError> {
    let config = Config { path, value };
    match config.text("quant_method") {
        Some("gptq") => config.gptq(),
        Some("awq") => config.awq(),
        Some("fp8") => config.fp8(),
        Some("compressed-tensors") => config.compressed(),
        Some("mxfp4") => Ok(Scheme::Mxfp4Experts),
        Some(other) => config.unsupported("quant_method", other, FIX),
        None => config.unsupported("quant_method", "(not given)", FIX),
    }
}

/// An object of the configuration, with its path in the file.
#[derive(Clone, Copy)]
struct Config<'a> {
    path: &'a Path,
    value: &'a Value,
}

impl<'a> Config<'a> {
    fn gptq(self) -> Result<Scheme, LoadError> {
        self.four_bits(self.get("bits"), "bits")?;
        if self.value.get("is_marlin_format").and_then(Value::as_bool) == Some(true) {
            return self.unsupported("is_marlin_format", true, FIX_FORMAT);
        }
        let is_overridden = |value: &Value| value.as_object().is_some_and(|own| !own.is_empty());
        if self.get("dynamic").is_some_and(is_overridden) {
            return self.unsupported("dynamic", "(an object)", FIX_LAYERS);
        }
        if let Some(other) = self.text("pack_dtype").filter(|dtype| *dtype != "int32") {
            return self.unsupported("pack_dtype", other, "int32 is");
        }
        let (field, format) = match self.text("checkpoint_format") {
            Some(format) => ("checkpoint_format", format),
            None => ("format", self.text("format").unwrap_or("gptq")),
        };
        let zero_offset = match format {
            "gptq" => 1,
            "gptq_v2" => 0,
            other => return self.unsupported(field, other, FIX_FORMAT),
        };
        Ok(Scheme::Int4 {
            packing: Packing::Gptq {
                zero_offset,
                has_order: self.get("desc_act").and_then(Value::as_bool) == Some(true),
            },
            group_size: self.group_size(self.get("group_size"), "group_size")?,
        })
    }

    fn awq(self) -> Result<Scheme, LoadError> {
        let either = |one, other| match self.get(one) {
            Some(value) => (one, Some(value)),
            None => (other, self.get(other)),
        };
        let (field, bits) = either("bits", "w_bit");
        self.four_bits(bits, field)?;
        let (field, version) = either("version", "format");
        let version = version.and_then(Value::as_str).unwrap_or("gemm");
        if !version.eq_ignore_ascii_case("gemm") {
            return self.unsupported(field, version, "gemm is; take such a checkout");
        }
        if self.get("zero_point").and_then(Value::as_bool) == Some(false) {
            return self.unsupported("zero_point", false, "it must be true");
        }
        let (field, group_size) = either("group_size", "q_group_size");
        Ok(Scheme::Int4 {
            packing: Packing::Awq,
            group_size: self.group_size(group_size, field)?,
        })
    }

    fn fp8(self) -> Result<Scheme, LoadError> {
        if let Some(scheme) = self.text("activation_scheme").filter(|it| *it != "dynamic") {
            return self.unsupported("activation_scheme", scheme, FIX_STATIC);
        }
        if let Some(other) = self.text("fmt").filter(|fmt| !fmt.contains("e4m3")) {
            return self.unsupported("fmt", other, "e4m3 is");
        }
        let field = "weight_block_size";
        Ok(Scheme::Fp8 {
            block: self.block(self.get(field), field)?,
        })
    }

    fn compressed(self) -> Result<Scheme, LoadError> {
        let sparsity = self.get("sparsity_config");
        let sparsity = sparsity.and_then(|config| config.get("format")?.as_str());
        if let Some(other) = sparsity.filter(|format| *format != "dense") {
            return self.unsupported("sparsity_config.format", other, "dense is");
        }
        self.refuse_transforms()?;
        let groups = self.get("config_groups").and_then(Value::as_object);
        let mut schemes = Vec::new();
        for (name, group) in groups.into_iter().flatten() {
            let group = Group {
                config: self,
                place: format!("config_groups.{name}"),
                group,
            };
            schemes.push(group.scheme()?);
        }
        match schemes.as_slice() {
            [] => self.bad("config_groups", "is empty"),
            [first, rest @ ..] if rest.iter().all(|scheme| scheme == first) => Ok(*first),
            _ => self.unsupported("config_groups", "(several kinds)", FIX_LAYERS),
        }
    }

    /// Rejects transforms that are computed with every step. Those of weights alone are in the stored numbers already.
    fn refuse_transforms(self) -> Result<(), LoadError> {
        let groups = self.value.pointer("/transform_config/config_groups");
        let groups = groups.and_then(Value::as_object);
        for (name, group) in groups.into_iter().flatten() {
            let transforms = group.get("apply").and_then(Value::as_array);
            for transform in transforms.into_iter().flatten() {
                let location = transform.get("location").and_then(Value::as_str);
                let location = location.unwrap_or("(not given)");
                if !["weight_input", "weight_output"].contains(&location) {
                    let field = format!("transform_config.config_groups.{name}.location");
                    return self.unsupported(&field, location, FIX_TRANSFORMS);
                }
            }
        }
        Ok(())
    }

    fn get(self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    fn text(self, key: &str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
    }

    fn unsupported<T>(
        self,
        field: &str,
        value: impl std::fmt::Display,
        fix: &'static str,
    ) -> Result<T, LoadError> {
        let field = format!("{FIELD}.{field}");
        Err(LoadError::unsupported(self.path, &field, value, fix))
    }

    fn bad<T>(self, field: &str, problem: &str) -> Result<T, LoadError> {
        let field = format!("{FIELD}.{field}");
        Err(LoadError::bad_config(self.path, &field, problem))
    }

    fn four_bits(self, bits: Option<&Value>, field: &str) -> Result<(), LoadError> {
        match bits {
            Some(bits) if bits.as_u64() == Some(4) => Ok(()),
            Some(bits) => self.unsupported(field, bits, FIX_BITS),
            None => self.bad(field, "missing"),
        }
    }

    /// Columns per group; `None` for -1, which means that a row is one group.
    fn group_size(self, size: Option<&Value>, field: &str) -> Result<Option<usize>, LoadError> {
        match size {
            Some(size) if size.as_i64() == Some(-1) => Ok(None),
            Some(size) => match in_range(size) {
                Some(size) => Ok(Some(size)),
                None => self.bad(
                    field,
                    &format!("is {size}; it must be -1 or 1 to {MAX_SIZE}"),
                ),
            },
            None => self.bad(field, "missing"),
        }
    }

    fn block(self, block: Option<&Value>, field: &str) -> Result<[usize; 2], LoadError> {
        let Some(block) = block else {
            return Ok(USUAL_BLOCK);
        };
        let sizes = block.as_array().map_or(&[][..], Vec::as_slice);
        // The form in older files of compressed-tensors.
        let text = block.as_str().and_then(|text| text.split_once('x'));
        match sizes {
            [rows, columns] => in_range(rows).zip(in_range(columns)),
            _ => text.and_then(|(rows, columns)| {
                let size = |text: &str| in_range(&serde_json::from_str(text).ok()?);
                size(rows).zip(size(columns))
            }),
        }
        .map_or_else(
            || self.bad(field, &format!("is {block}; it must be two sizes")),
            |(rows, columns)| Ok([rows, columns]),
        )
    }
}

const FIX_FORMAT: &str = "gptq and gptq_v2 are; take a checkout in one of these formats";

/// A size in the valid range.
fn in_range(size: &Value) -> Option<usize> {
    let size = usize::try_from(size.as_u64()?).ok()?;
    (1..=MAX_SIZE).contains(&size).then_some(size)
}

/// A group of layers of compressed-tensors.
struct Group<'a> {
    config: Config<'a>,
    /// Its path in the file.
    place: String,
    group: &'a Value,
}

impl Group<'_> {
    fn scheme(&self) -> Result<Scheme, LoadError> {
        let weights = |key: &str| self.value(&format!("/weights/{key}"));
        let own = self.group.get("format").and_then(Value::as_str);
        let format = own
            .or_else(|| self.config.text("format"))
            .unwrap_or_default();
        let field = |key: &str| format!("{}.{key}", self.place);
        let strategy = weights("strategy")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let size_field = field("weights.group_size");
        match format {
            "pack-quantized" => {
                self.config
                    .four_bits(weights("num_bits"), &field("weights.num_bits"))?;
                self.refuse_fixed_scales()?;
                let group_size = match strategy {
                    "group" => self.config.group_size(weights("group_size"), &size_field)?,
                    "channel" => None,
                    other => {
                        let fix = "group and channel are";
                        return self
                            .config
                            .unsupported(&field("weights.strategy"), other, fix);
                    }
                };
                let is_symmetric = weights("symmetric").and_then(Value::as_bool);
                Ok(Scheme::Int4 {
                    packing: Packing::Compressed {
                        has_zeros: is_symmetric == Some(false),
                    },
                    group_size,
                })
            }
            "float-quantized" | "naive-quantized" => {
                let kind = weights("type").and_then(Value::as_str).unwrap_or_default();
                if kind != "float" {
                    return self.config.unsupported(&field("weights.type"), kind, FIX);
                }
                if let Some(bits) = weights("num_bits").filter(|bits| bits.as_u64() != Some(8)) {
                    let field = field("weights.num_bits");
                    return self.config.unsupported(&field, bits, "8 is");
                }
                self.refuse_fixed_scales()?;
                let block_field = field("weights.block_structure");
                Ok(Scheme::Fp8 {
                    block: self
                        .config
                        .block(weights("block_structure"), &block_field)?,
                })
            }
            other => self.config.unsupported("format", other, FIX),
        }
    }

    fn value(&self, pointer: &str) -> Option<&Value> {
        let value = self.group.pointer(pointer);
        value.filter(|value| !value.is_null())
    }

    /// Rejects activations with fixed scales.
    fn refuse_fixed_scales(&self) -> Result<(), LoadError> {
        let Some(activations) = self.value("/input_activations") else {
            return Ok(());
        };
        if activations.get("dynamic").and_then(Value::as_bool) == Some(true) {
            return Ok(());
        }
        let field = format!("{}.input_activations", self.place);
        self.config.unsupported(&field, "(static)", FIX_STATIC)
    }
}
