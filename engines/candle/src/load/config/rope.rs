//! Reads [`Rope`] from the keys of a `config.json`.

use serde_json::Value;

use super::family::{Family, WindowTheta};
use super::window::period;
use super::{Source, single};
use crate::error::LoadError;
use crate::model::config::{QueryGrowth, Rope, RopeScaling};

/// How frequencies are scaled, and the amplitude of rotated dimensions.
type Scaling = (RopeScaling, f32);

impl Source<'_> {
    pub(super) fn rope(&self) -> Result<Rope, LoadError> {
        let raw = &self.raw;
        // `transformers` 5 has one object, for Gemma 3 one for each kind of layer; version 4 had separate keys.
        let parameters = raw.rope_parameters.as_ref();
        let of_kind = |kind: &str| parameters.and_then(|parameters| parameters.get(kind));
        let full = of_kind("full_attention").or(parameters);
        let theta_of = |object: Option<&Value>| {
            object
                .and_then(|object| object.get("rope_theta"))
                .and_then(Value::as_f64)
        };
        let theta = theta_of(full).or(raw.rope_theta);
        let theta = theta.unwrap_or(self.family.facts().theta) * self.theta_factor();
        let of_windows = theta_of(of_kind("sliding_attention")).or(raw.rope_local_base_freq);
        let window_theta = match self.family.facts().window_theta {
            WindowTheta::Same => None,
            WindowTheta::Unscaled => Some(of_windows.unwrap_or(theta)),
            WindowTheta::Own(by_default) => Some(of_windows.unwrap_or(by_default)),
        };
        let rotary_dim = self.rotary_dim(full)?;
        let (scaling, amplitude) = match self.scaling_object() {
            Some(object) => self.scaling(object, rotary_dim)?,
            None => (RopeScaling::None, 1.0),
        };
        Ok(Rope {
            theta: single(theta),
            window_theta: window_theta.map(single),
            scaling,
            rotary_dim,
            amplitude,
            is_paired: self.family.facts().is_paired,
            still_every: self.still_every()?,
        })
    }

    /// Hunyuan's factor of the base, by which "dynamic" is the same for all lengths.
    fn theta_factor(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a head's width")]
        let head_dim = self.head_dim() as f64;
        let factor = |alpha: f64| alpha.powf(head_dim / (head_dim - 2.0));
        self.alpha().map_or(1.0, factor)
    }

    fn alpha(&self) -> Option<f64> {
        let object = self.scaling_object()?;
        let kind = object.get("rope_type").or_else(|| object.get("type"))?;
        let alpha = object.get("alpha").and_then(Value::as_f64);
        alpha.filter(|_| self.family == Family::Hunyuan && kind == "dynamic")
    }

    /// The object in the file that describes how frequencies are scaled. If a file has the objects of both versions, version 5 of
    /// `transformers` takes the older one too: it is what model cards say to add for a longer context.
    fn scaling_object(&self) -> Option<&Value> {
        let parameters = self.raw.rope_parameters.as_ref();
        let full = parameters.and_then(|parameters| parameters.get("full_attention"));
        let added = self.raw.rope_scaling.as_ref();
        let added = added.filter(|added| added.as_object().is_some_and(|it| !it.is_empty()));
        added.or(full).or(parameters)
    }

    /// The maximum length of a sequence in tokens.
    pub(super) fn context_length(&self, scaling: &RopeScaling) -> usize {
        let object = self.scaling_object();
        let is_named = object.is_some_and(|object| self.names_original_context(object));
        context_length(self.raw.max_position_embeddings, scaling, is_named)
    }

    pub(super) fn query_growth(&self) -> Result<Option<QueryGrowth>, LoadError> {
        let of = |object: &Value| object.get("llama_4_scaling_beta")?.as_f64();
        let Some(object) = self.scaling_object() else {
            return Ok(None);
        };
        let slope = of(object).filter(|_| self.family == Family::Ministral3);
        let Some(slope) = slope else {
            return Ok(None);
        };
        Ok(Some(QueryGrowth {
            slope: single(slope),
            period: self.original_context(object)?,
        }))
    }

    /// The period of layers without rotation: one in that many.
    fn still_every(&self) -> Result<Option<usize>, LoadError> {
        let raw = &self.raw;
        if matches!(self.family, Family::Exaone4 | Family::Cohere2) {
            return self.still_without_window();
        }
        if self.family != Family::SmolLm3 {
            return Ok(None);
        }
        let Some(layers) = &raw.no_rope_layers else {
            let interval = raw.no_rope_layer_interval.unwrap_or(4);
            return Ok(Some(interval.max(1)));
        };
        let field = "no_rope_layers";
        let Some(layers) = layers.get(..raw.num_hidden_layers) else {
            let problem = format!("has {} numbers, fewer than layers", layers.len());
            return Err(LoadError::bad_config(self.path, field, problem));
        };
        let is_still: Vec<bool> = layers.iter().map(|turns| *turns == 0).collect();
        if let Some(every) = period(&is_still) {
            return Ok(every);
        }
        let value = format!("{layers:?}");
        self.unsupported(field, value, "every nth layer must be 0 and all others 1")
    }

    /// As [`Self::still_every`], if layers without a window do not rotate. If no layer can have one, all of EXAONE's rotate.
    fn still_without_window(&self) -> Result<Option<usize>, LoadError> {
        Ok(match self.window()? {
            Some(window) => window.full_every,
            None if self.raw.sliding_window == Some(None) && self.family == Family::Exaone4 => None,
            None => Some(1),
        })
    }

    /// The number of rotated dimensions per head.
    fn rotary_dim(&self, parameters: Option<&Value>) -> Result<usize, LoadError> {
        const KEY: &str = "partial_rotary_factor";
        let in_parameters = parameters.and_then(|object| object.get(KEY)?.as_f64());
        let by_default = self.family.facts().partial_rotary_factor;
        let factor = self.raw.partial_rotary_factor.or(in_parameters);
        let factor = factor.or(by_default);
        let head_dim = self.head_dim();
        let factor = factor.filter(|factor| (factor - 1.0).abs() > f64::EPSILON);
        let Some(factor) = factor else {
            return Ok(head_dim);
        };
        if by_default.is_none() {
            return self.unsupported(KEY, factor, "it must be 1");
        }
        let dim = turning(head_dim, factor);
        if dim > 0 && dim.is_multiple_of(2) {
            return Ok(dim);
        }
        let problem =
            format!("is {factor}; of a head's {head_dim} dimensions an even number turns");
        Err(LoadError::bad_config(self.path, KEY, problem))
    }

    fn scaling(&self, object: &Value, rotary_dim: usize) -> Result<Scaling, LoadError> {
        let kind = object
            .get("rope_type")
            .or_else(|| object.get("type"))
            .and_then(Value::as_str);
        let number = |key: &str| self.positive(object, key);
        match kind {
            None | Some("default") => Ok((RopeScaling::None, 1.0)),
            Some("dynamic") if self.alpha().is_some() => Ok((RopeScaling::None, 1.0)),
            Some("linear") => {
                let factor = number("factor")?;
                Ok((RopeScaling::Linear { factor }, 1.0))
            }
            Some("llama3") => {
                let scaling = RopeScaling::Llama3 {
                    factor: number("factor")?,
                    low_freq_factor: number("low_freq_factor")?,
                    high_freq_factor: number("high_freq_factor")?,
                    original_context_length: self.original_context(object)?,
                };
                Ok((scaling, 1.0))
            }
            Some("longrope" | "su") => self.longrope(object, rotary_dim),
            // The name in Phi-3's first checkouts.
            Some("yarn") if self.family == Family::Phi3 => self.longrope(object, rotary_dim),
            Some("yarn") => self.yarn(object),
            Some(other) => {
                let fix = "default, linear, llama3, longrope and yarn are; without it the model has its shorter context";
                self.unsupported("rope_scaling.rope_type", other, fix)
            }
        }
    }

    /// LongRoPE has one set of factors for contexts up to the original one, and another for longer ones. Rotated keys stay in the
    /// cache, so the choice is made once, by the model's longest context.
    fn longrope(&self, object: &Value, rotary_dim: usize) -> Result<Scaling, LoadError> {
        let original = self.original_context(object)?;
        let longest = self.raw.max_position_embeddings;
        let key = if longest > original {
            "long_factor"
        } else {
            "short_factor"
        };
        let factors = self.factors(object, key, rotary_dim / 2)?;
        let factor = match object.get("factor") {
            Some(Value::Null) | None => ratio(longest, original),
            Some(_) => self.positive(object, "factor")?,
        };
        let amplitude = match object.get("attention_factor") {
            Some(Value::Null) | None => longrope_amplitude(factor, original),
            Some(_) => self.positive(object, "attention_factor")?,
        };
        Ok((RopeScaling::Factors(factors), amplitude))
    }

    fn yarn(&self, object: &Value) -> Result<Scaling, LoadError> {
        let is_given = |key: &str| object.get(key).is_some_and(|value| !value.is_null());
        let optional = |key: &str| {
            let number = is_given(key).then(|| self.positive(object, key));
            number.transpose()
        };
        let original_context_length = if self.names_original_context(object) {
            self.original_context(object)?
        } else {
            self.raw.max_position_embeddings
        };
        let by_contexts = ratio(self.raw.max_position_embeddings, original_context_length);
        let factor = optional("factor")?.unwrap_or(by_contexts);
        let amplitude = match optional("attention_factor")? {
            Some(amplitude) => amplitude,
            None => match (optional("mscale")?, optional("mscale_all_dim")?) {
                (Some(one), Some(all)) => yarn_amplitude(factor, one) / yarn_amplitude(factor, all),
                (Some(_) | None, Some(_) | None) => yarn_amplitude(factor, 1.0),
            },
        };
        let scaling = RopeScaling::Yarn {
            factor,
            fast_turns: optional("beta_fast")?.unwrap_or(32.0),
            slow_turns: optional("beta_slow")?.unwrap_or(1.0),
            original_context_length,
            is_rounded: object.get("truncate").and_then(Value::as_bool) != Some(false),
        };
        Ok((scaling, amplitude))
    }

    fn factors(&self, object: &Value, key: &str, pairs: usize) -> Result<Vec<f32>, LoadError> {
        let given = object.get(key).and_then(Value::as_array);
        let numbers = given.map_or(&[][..], Vec::as_slice).iter();
        let factors: Vec<f32> = numbers
            .filter_map(Value::as_f64)
            .filter(|factor| factor.is_finite() && *factor > 0.0)
            .map(single)
            .collect();
        if factors.len() == pairs && given.is_some_and(|given| given.len() == pairs) {
            return Ok(factors);
        }
        let problem = format!(
            "has {} positive numbers; it needs {pairs}, one for each pair of dimensions that turns",
            factors.len()
        );
        Err(LoadError::bad_config(
            self.path,
            &format!("rope_scaling.{key}"),
            problem,
        ))
    }

    /// Whether the file names the original context length.
    fn names_original_context(&self, object: &Value) -> bool {
        let given = object.get("original_max_position_embeddings");
        given.is_some_and(|given| !given.is_null())
            || self.raw.original_max_position_embeddings.is_some()
    }

    /// The model's original context length in tokens.
    fn original_context(&self, object: &Value) -> Result<usize, LoadError> {
        let original = "original_max_position_embeddings";
        let given = object.get(original).and_then(Value::as_u64);
        let given = given.and_then(|given| usize::try_from(given).ok());
        let given = given.or(self.raw.original_max_position_embeddings);
        given.filter(|given| *given > 1).ok_or_else(|| {
            let field = format!("rope_scaling.{original}");
            LoadError::bad_config(self.path, &field, "is no size above 1")
        })
    }

    fn positive(&self, object: &Value, key: &str) -> Result<f32, LoadError> {
        let found = object.get(key).and_then(Value::as_f64);
        let found = found.filter(|value| value.is_finite() && *value > 0.0);
        found.map(single).ok_or_else(|| {
            let field = format!("rope_scaling.{key}");
            LoadError::bad_config(self.path, &field, "is no positive number")
        })
    }
}

/// The number of rotated dimensions per head: rounded down, as in `transformers`. The width is not checked yet.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the cast saturates, and what is out of range is refused as a head's width"
)]
fn turning(head_dim: usize, factor: f64) -> usize {
    ((head_dim as f64 * factor) as usize).min(head_dim)
}

#[expect(clippy::cast_precision_loss, reason = "contexts of models")]
fn ratio(longest: usize, original: usize) -> f32 {
    longest as f32 / original as f32
}

/// The maximum length of a sequence for a file that says `said`. That is often still the original context; YaRN's extension of
/// it counts if it is longer. `is_named` tells whether the file names the original context separately.
pub(crate) fn context_length(said: usize, scaling: &RopeScaling, is_named: bool) -> usize {
    match scaling {
        RopeScaling::Yarn {
            factor,
            original_context_length,
            ..
        } if is_named => said.max(stretched(*original_context_length, *factor)),
        RopeScaling::None
        | RopeScaling::Linear { .. }
        | RopeScaling::Llama3 { .. }
        | RopeScaling::Factors(_)
        | RopeScaling::Yarn { .. } => said,
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the cast saturates, and what is out of range is refused as a context"
)]
fn stretched(original: usize, factor: f32) -> usize {
    (original as f64 * f64::from(factor)).round() as usize
}

/// YaRN's attention factor for a context `factor` times as long as the original one.
pub(crate) fn yarn_amplitude(factor: f32, scale: f32) -> f32 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * scale * factor.ln() + 1.0
    }
}

/// LongRoPE's attention factor for a context `factor` times as long as the original one.
#[expect(clippy::cast_precision_loss, reason = "contexts of models")]
fn longrope_amplitude(factor: f32, original: usize) -> f32 {
    if factor <= 1.0 {
        1.0
    } else {
        (1.0 + factor.ln() / (original as f32).ln()).sqrt()
    }
}
