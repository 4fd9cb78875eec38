//! [`CallObject`]: a call written as a JSON object, parsed one character at a time.

use std::sync::Arc;

use serde_json::Value;

use crate::markup::{Deltas, ValueScan, ValueStep};
use crate::tools::ToolSchemas;

/// The keys of a tool's name, and of its arguments, in all dialects.
const NAMES: [&str; 2] = ["name", "tool_name"];
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// A partial call.
pub(super) struct CallObject {
    /// The request's tools, if it has no marker: then it is a call only if it names one of them and has arguments.
    tools: Option<Arc<ToolSchemas>>,
    /// Whether its key is the tool's name, and the value its arguments.
    is_keyed: bool,
    /// Its text, and the bracket of a list before it, until it is reported.
    raw: String,
    place: Place,
    key: String,
    value: String,
    scan: ValueScan,
    name: Option<String>,
    arguments: Option<String>,
    is_reported: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Open,
    Key,
    InKey,
    Colon,
    BeforeValue,
    InValue,
    /// Inside arguments, which are emitted as they arrive.
    InArguments,
}

/// What a character means for the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ObjectStep {
    Inside,
    Last,
    /// It is not JSON.
    Broken,
}

impl CallObject {
    /// A call after this text, which is content if it is none.
    pub(super) fn new(tools: Option<Arc<ToolSchemas>>, is_keyed: bool, before: &str) -> Self {
        Self {
            tools,
            is_keyed,
            raw: before.to_owned(),
            place: Place::Open,
            key: String::new(),
            value: String::new(),
            scan: ValueScan::default(),
            name: None,
            arguments: None,
            is_reported: false,
        }
    }

    pub(super) fn is_in_string(&self) -> bool {
        match self.place {
            Place::InKey | Place::InValue | Place::InArguments => self.scan.is_in_string(),
            Place::Open | Place::Key | Place::Colon | Place::BeforeValue => false,
        }
    }

    /// The unreported text.
    pub(super) fn raw(&self) -> &str {
        &self.raw
    }

    /// Takes the next character, beginning with the opening brace.
    pub(super) fn take(&mut self, c: char, out: &mut Deltas) -> ObjectStep {
        if !self.is_reported {
            self.raw.push(c);
        }
        let step = self.step(c, out);
        if self.is_reported && step == ObjectStep::Broken {
            self.raw.push(c);
        }
        step
    }

    fn step(&mut self, c: char, out: &mut Deltas) -> ObjectStep {
        match (self.place, c) {
            (Place::Open, _) => self.place = Place::Key,
            (Place::Key, ',') => {}
            (Place::Key, '}') => return ObjectStep::Last,
            (Place::Key, '"') => {
                self.scan = ValueScan::default();
                self.key.clear();
                self.place = Place::InKey;
                self.take_key(c);
            }
            (Place::InKey, _) => self.take_key(c),
            (Place::Colon, ':') => self.place = Place::BeforeValue,
            (Place::Key | Place::Colon | Place::BeforeValue, _) if c.is_whitespace() => {}
            (Place::Key | Place::Colon, _) => return ObjectStep::Broken,
            (Place::BeforeValue, _) => return self.begin_value(c, out),
            (Place::InValue | Place::InArguments, _) => return self.take_value(c, out),
        }
        ObjectStep::Inside
    }

    fn take_key(&mut self, c: char) {
        if self.scan.take(c) == ValueStep::Last {
            self.place = Place::Colon;
            if self.is_keyed && !self.key.is_empty() {
                self.name = Some(self.key.clone());
            }
        } else if c != '"' {
            self.key.push(c);
        }
    }

    fn is_arguments(&self) -> bool {
        self.is_keyed || ARGUMENTS.contains(&self.key.as_str())
    }

    fn begin_value(&mut self, c: char, out: &mut Deltas) -> ObjectStep {
        self.scan = ValueScan::default();
        self.value.clear();
        self.place = Place::InValue;
        if matches!(c, '{' | '[') && self.is_arguments() && self.report(out) {
            self.place = Place::InArguments;
        }
        self.take_value(c, out)
    }

    fn take_value(&mut self, c: char, out: &mut Deltas) -> ObjectStep {
        let step = self.scan.take(c);
        if step != ValueStep::Behind {
            if self.place == Place::InArguments {
                out.arguments(c.encode_utf8(&mut [0; 4]));
            } else {
                self.value.push(c);
            }
        }
        if step == ValueStep::Inside {
            return ObjectStep::Inside;
        }
        self.end_value();
        match (step, c) {
            (ValueStep::Behind, '}') => ObjectStep::Last,
            (ValueStep::Behind, ']') => ObjectStep::Broken,
            _ => ObjectStep::Inside,
        }
    }

    fn end_value(&mut self) {
        let is_arguments = self.place == Place::InArguments;
        self.place = Place::Key;
        if is_arguments || self.is_reported {
            return;
        }
        if self.is_arguments() {
            self.arguments = Some(plain_arguments(std::mem::take(&mut self.value)));
        } else if NAMES.contains(&self.key.as_str()) {
            self.name = serde_json::from_str(&self.value)
                .ok()
                .filter(|name: &String| !name.is_empty());
        }
    }

    /// Reports the call if its name is known; false if it cannot be reported, or was already.
    fn report(&mut self, out: &mut Deltas) -> bool {
        let Some(name) = self.name.take() else {
            return false;
        };
        if self.tools.as_ref().is_some_and(|tools| !tools.has(&name)) {
            return false;
        }
        out.tool_call(&name, "");
        self.raw.clear();
        self.is_reported = true;
        true
    }

    /// Ends the object. Returns whether it was a call, which is then reported.
    pub(super) fn close(&mut self, out: &mut Deltas) -> bool {
        if self.is_reported {
            return true;
        }
        if self.name.is_none() {
            self.unwrap_function();
        }
        let is_enough = self.tools.is_none() || self.arguments.is_some();
        if !is_enough || !self.report(out) {
            return false;
        }
        out.arguments(self.arguments.as_deref().unwrap_or("{}"));
        true
    }

    /// Whether it is inside arguments that are not emitted as they arrive: those written as a string.
    pub(super) fn has_open_arguments(&self) -> bool {
        self.place == Place::InValue && self.is_arguments()
    }

    /// The answer ends within the object. Returns whether the call's name had come; it is then reported, with the arguments so far.
    pub(super) fn cut_short(&mut self, out: &mut Deltas) -> bool {
        if self.is_reported {
            return true;
        }
        let arguments = match self.arguments.take() {
            None if self.has_open_arguments() => {
                let text = serde_json::from_str(&format!("{}\"", self.value));
                text.unwrap_or_else(|_| self.value.clone())
            }
            whole => whole.unwrap_or_default(),
        };
        let is_call = self.report(out);
        if is_call {
            out.arguments(&arguments);
        }
        is_call
    }

    /// Unwraps a call in the format of OpenAI's API: `{"type": "function", "function": {...}}`.
    fn unwrap_function(&mut self) {
        let object = self.raw.find('{').and_then(|begin| self.raw.get(begin..));
        let Ok(object) = serde_json::from_str::<Value>(object.unwrap_or_default()) else {
            return;
        };
        let Some(function) = object.get("function") else {
            return;
        };
        self.name = function["name"].as_str().map(str::to_owned);
        let mut arguments = ARGUMENTS.iter().filter_map(|key| function.get(key));
        self.arguments = arguments
            .next()
            .map(|value| plain_arguments(value.to_string()));
    }
}

/// Arguments given as a JSON string are that string's content; `null` and an empty text mean no arguments.
fn plain_arguments(json: String) -> String {
    let arguments = if json.starts_with('"') {
        serde_json::from_str(&json).unwrap_or(json)
    } else {
        json
    };
    if matches!(arguments.trim(), "" | "null") {
        return "{}".into();
    }
    arguments
}
