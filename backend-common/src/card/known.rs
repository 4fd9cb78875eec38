//! Decodes the lists of names in a [`ModelCard`](super::ModelCard) and drops unknown names, so that a newer worker still works
//! with the names that both sides know. Nothing here requests an unknown ability, and the worker refuses what its engine does not
//! support. An engine's own declaration is decoded strictly, elsewhere.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error};
use serde_json::{Map, Value};

use super::EndpointType;
use crate::config::{Capabilities, Deviation, GuidedKind, InputKind, SamplingOption};
use crate::engine::Role;
use crate::request::MediaKind;

/// Decodes a card's `endpoint_types`.
pub(super) fn endpoint_types<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeSet<EndpointType>, D::Error> {
    let mut names = Vec::<Value>::deserialize(deserializer)?;
    retain_known::<EndpointType>(&mut names);
    BTreeSet::deserialize(Value::Array(names)).map_err(D::Error::custom)
}

/// Decodes a card's `capabilities`.
pub(super) fn capabilities<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Capabilities, D::Error> {
    let mut fields = Map::<String, Value>::deserialize(deserializer)?;
    let mut retain = |field: &str, retain_known: fn(&mut Vec<Value>)| {
        if let Some(Value::Array(names)) = fields.get_mut(field) {
            retain_known(names);
        }
    };
    retain("inputs", retain_known::<InputKind>);
    retain("media", retain_known::<MediaKind>);
    retain("sampling", retain_known::<SamplingOption>);
    retain("guided", retain_known::<GuidedKind>);
    retain("roles", retain_known::<Role>);
    retain("deviations", retain_known::<Deviation>);
    Capabilities::deserialize(Value::Object(fields)).map_err(D::Error::custom)
}

/// Drops names that `T` does not have. Non-names stay, and fail to decode later.
fn retain_known<T: DeserializeOwned>(names: &mut Vec<Value>) {
    names.retain(|name| !name.is_string() || T::deserialize(name).is_ok());
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::card::ModelCard;
    use crate::config::EngineConfig;

    fn card() -> ModelCard {
        let capabilities = Capabilities {
            inputs: [InputKind::Tokens, InputKind::Embed].into(),
            media: [MediaKind::Image].into(),
            sampling: [SamplingOption::Seed].into(),
            guided: [GuidedKind::Regex].into(),
            roles: [Role::Decode].into(),
            deviations: [Deviation::BatchVariant].into(),
            ..Capabilities::default()
        };
        ModelCard::from_config(&EngineConfig::new("m", 10).with_capabilities(capabilities))
    }

    /// Returns every list of names in a card.
    fn lists(card: &mut Value) -> Vec<&mut Vec<Value>> {
        let (mut types, mut can) = (None, None);
        for (field, value) in card.as_object_mut().unwrap() {
            match field.as_str() {
                "endpoint_types" => types = value.as_array_mut(),
                "capabilities" => can = value.as_object_mut(),
                _ => {}
            }
        }
        let sets = can.unwrap().values_mut().filter_map(Value::as_array_mut);
        types.into_iter().chain(sets).collect()
    }

    #[test]
    fn names_of_newer_versions_are_left_out() {
        let mut written = serde_json::to_value(card()).unwrap();
        let mut lists = lists(&mut written);
        assert_eq!(lists.len(), 7);
        for list in &mut lists {
            list.insert(0, json!("of_tomorrow"));
        }
        let read: ModelCard = serde_json::from_value(written).unwrap();
        assert_eq!(read, card());
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for place in 0..7 {
            let mut written = serde_json::to_value(card()).unwrap();
            lists(&mut written)[place].push(json!(7));
            serde_json::from_value::<ModelCard>(written).unwrap_err();
        }
    }

    #[test]
    fn engines_are_read_strictly() {
        let declared = json!({"inputs": ["tokens", "of_tomorrow"]});
        serde_json::from_value::<Capabilities>(declared).unwrap_err();
    }
}
