//! Matches requests to a reply.

use regex::Regex;

use super::ReplyError;
use super::raw::RawMatch;
use crate::conversation::Conversation;

/// The conditions of a reply. All conditions must hold; a reply without conditions matches every request.
#[derive(Debug, Default)]
pub(crate) struct Matcher {
    exact: Option<String>,
    contains: Option<String>,
    regex: Option<Regex>,
    last_role: Option<String>,
}

impl Matcher {
    /// Whether it matches every request.
    pub(crate) fn is_any(&self) -> bool {
        self.exact.is_none()
            && self.contains.is_none()
            && self.regex.is_none()
            && self.last_role.is_none()
    }

    /// Whether it has a condition that only chat messages can meet.
    pub(crate) fn needs_messages(&self) -> bool {
        self.last_role.is_some()
    }

    pub(crate) fn matches(&self, conversation: &Conversation) -> bool {
        let text = conversation.last_user.as_str();
        let exact = self.exact.as_ref();
        let role = self.last_role.as_ref();
        exact.is_none_or(|exact| exact.trim() == text.trim())
            && self
                .contains
                .as_ref()
                .is_none_or(|part| text.contains(part))
            && self.regex.as_ref().is_none_or(|regex| regex.is_match(text))
            && role.is_none_or(|role| conversation.last_role.as_ref() == Some(role))
    }
}

impl TryFrom<RawMatch> for Matcher {
    type Error = ReplyError;

    fn try_from(raw: RawMatch) -> Result<Self, ReplyError> {
        let regex = raw.regex.as_deref().map(Regex::new).transpose();
        let matcher = Self {
            exact: raw.exact,
            contains: raw.contains,
            regex: regex.map_err(|error| ReplyError::new("match.regex", error.to_string()))?,
            last_role: raw.last_role,
        };
        if matcher.contains.as_deref() == Some("") {
            let problem = "must not be empty: every message contains it; leave `match` out";
            return Err(ReplyError::new("match.contains", problem));
        }
        if matcher.is_any() {
            let problem =
                "needs exact, contains, regex or last_role; leave `match` out for every request";
            return Err(ReplyError::new("match", problem));
        }
        Ok(matcher)
    }
}
