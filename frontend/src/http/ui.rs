//! `/` and `/dashboard`: a chat and live charts, for people. Their files are in the binary and use only the server's public API.
//! They contain nothing that a key protects, so they need no key.

use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::future::ready;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};

use super::handlers::App;

/// Allows only this server's resources; no inline script, style or handler, no embedding in another page, and no string that
/// becomes HTML.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const PICTURE: &str = "image/svg+xml";

/// A path, its content type, and its content.
type File = (&'static str, &'static str, &'static str);

macro_rules! files {
    ($($path:literal $kind:ident $name:literal,)*) => {
        &[$(($path, $kind, include_str!(concat!("../../ui/", $name))),)*]
    };
}

const FILES: &[File] = files! {
    "/" HTML "chat.html",
    "/dashboard" HTML "dashboard.html",
    "/ui/api.js" SCRIPT "api.js",
    "/ui/charts.js" SCRIPT "charts.js",
    "/ui/chat.js" SCRIPT "chat.js",
    "/ui/conversations.js" SCRIPT "conversations.js",
    "/ui/dashboard.js" SCRIPT "dashboard.js",
    "/ui/dom.js" SCRIPT "dom.js",
    "/ui/markdown.js" SCRIPT "markdown.js",
    "/ui/messages.js" SCRIPT "messages.js",
    "/ui/metrics.js" SCRIPT "metrics.js",
    "/ui/settings.js" SCRIPT "settings.js",
    "/ui/theme.js" SCRIPT "theme.js",
    "/ui/style.css" STYLE "style.css",
    "/ui/icon.svg" PICTURE "icon.svg",
};

/// The routes of the pages.
pub(super) fn routes() -> Router<App> {
    FILES.iter().fold(Router::new(), |router, file| {
        router.route(file.0, get(move || ready(response(file))))
    })
}

fn response((_, kind, content): &File) -> Response {
    let headers = [
        (CONTENT_TYPE, *kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        // Another version of the server has different files under the same names.
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, *content).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks for what the policy would refuse in a browser, and for code that would read a model's text as HTML.
    #[test]
    fn pages_hold_no_script_no_style_and_nothing_from_elsewhere() {
        for (path, kind, content) in FILES {
            let forbidden: &[&str] = match *kind {
                HTML => &[
                    "<style",
                    "style=",
                    "javascript:",
                    "<script>",
                    "http:",
                    "https:",
                    "//",
                ],
                SCRIPT => &[
                    "innerHTML",
                    "outerHTML",
                    "insertAdjacentHTML",
                    "document.write",
                    "eval(",
                    "Function(",
                ],
                STYLE => &["url(", "@import"],
                _ => &["<script", "href"],
            };
            for word in forbidden {
                let found = content
                    .find(word)
                    .map(|at| &content[at..content.len().min(at + 40)]);
                assert_eq!(found, None, "{path} has {word:?}");
            }
            let is_handler = |word: &str| word.starts_with("on") && word.contains('=');
            assert!(*kind != HTML || !content.split_whitespace().any(is_handler));
        }
    }

    #[test]
    fn everything_that_a_page_asks_for_is_there_and_all_is_small() {
        let is_there = |path: &str| FILES.iter().any(|(known, ..)| *known == path);
        let bytes: usize = FILES.iter().map(|(.., content)| content.len()).sum();
        assert!(bytes < 200_000, "{bytes} bytes");
        for (path, _, content) in FILES {
            let asked = content.split('"').filter(|word| word.starts_with("/ui/"));
            for word in asked {
                assert!(is_there(word), "{path} asks for {word}");
            }
        }
    }
}
