//! What web pages may do on a server that requires no keys. A browser sends requests for any page that a user opens, also to this
//! machine, and names the page in headers that pages cannot change. So a page must be the server's own or have a listed origin.
//! What it posts must be JSON, which needs a preflight. On loopback, the server's name must be one of this machine's. Programs
//! other than browsers send none of these headers. With keys, the page is not checked: pages have no key.
//!
//! # Source
//! [Fetch metadata](https://www.w3.org/TR/fetch-metadata/), and its
//! [resource isolation policy](https://web.dev/articles/fetch-metadata).

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use genset_runtime::unknown_host;
use http::header::{CONTENT_TYPE, HOST, ORIGIN};
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use http_body::Body as _;

use super::access::refused;
use super::handlers::App;
use crate::config::{AllowedHost, FrontendConfig, Origin};
use crate::error::{ApiError, shown};

const SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");
const DESTINATION: HeaderName = HeaderName::from_static("sec-fetch-dest");

/// Passes a request on, or refuses it.
pub(super) async fn guard(State(app): State<App>, request: Request, next: Next) -> Response {
    match check(&app.config, &request) {
        Ok(()) => next.run(request).await,
        Err(error) => refused(&app, &request, "forbidden", &error),
    }
}

fn check(config: &FrontendConfig, request: &Request) -> Result<(), ApiError> {
    check_host(config, request)?;
    let headers = request.headers();
    let is_of_a_page = headers.contains_key(ORIGIN) || headers.contains_key(SITE);
    if config.api_keys.is_some() || !is_of_a_page {
        return Ok(());
    }
    check_origin(config, request)?;
    let has_body = !request.body().is_end_stream();
    if request.method() == Method::POST && has_body && !is_json(headers) {
        let message = "A web page's request must have the content type application/json here.";
        return Err(ApiError {
            param: Some("content-type".into()),
            ..ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
        });
    }
    Ok(())
}

/// Checks the request's host name if only this machine may send requests, or if names are listed.
fn check_host(config: &FrontendConfig, request: &Request) -> Result<(), ApiError> {
    let listed = &config.allowed_hosts;
    if !config.is_for_this_machine() && listed.is_empty() {
        return Ok(());
    }
    let is_listed = |host: &str| listed.iter().any(|name| name.allows(host));
    let unknown = unknown_host(request.headers(), request.uri(), is_listed);
    let Some(host) = unknown.filter(|_| !listed.iter().any(AllowedHost::is_any)) else {
        return Ok(());
    };
    let host = shown(&host);
    let message = format!(
        "This server does not answer to the name {host:?}. Use its address or localhost, or start it with \
         --allowed-hosts and this name."
    );
    Err(ApiError {
        param: Some("host".into()),
        code: Some("host_not_allowed"),
        ..ApiError::new(StatusCode::FORBIDDEN, message)
    })
}

fn check_origin(config: &FrontendConfig, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    let origins = &config.cors_origins;
    let is_any = origins.iter().any(Origin::is_any);
    let is_listed =
        |origin: &HeaderValue| is_any || origins.iter().any(|known| known.header() == origin);
    let origin = headers.get(ORIGIN);
    let is_allowed = match origin {
        Some(origin) => is_listed(origin) || is_own(origin, headers),
        None => is_of_own_site(headers) || is_visit(request) || is_any,
    };
    if is_allowed {
        return Ok(());
    }
    let page = origin.map(|origin| String::from_utf8_lossy(origin.as_bytes()));
    let page = page.map_or("another site".into(), |page| format!("{:?}", shown(&page)));
    let message = format!(
        "Pages of {page} may not use this server. Start it with --cors-origins and their origin to let them."
    );
    Err(ApiError {
        param: Some("origin".into()),
        code: Some("origin_not_allowed"),
        ..ApiError::new(StatusCode::FORBIDDEN, message)
    })
}

/// Whether the page is one of this server's. If the browser compared the two itself, its result is used: a proxy in between may
/// have changed the host name.
fn is_own(origin: &HeaderValue, headers: &HeaderMap) -> bool {
    if let Some(site) = headers.get(SITE) {
        return site == "same-origin";
    }
    // Neither contains the default port of its scheme.
    let authority = origin
        .to_str()
        .ok()
        .and_then(|origin| origin.split_once("://"));
    let authority = authority.and_then(|(_, rest)| Authority::try_from(rest).ok());
    let host = headers.get(HOST).map(HeaderValue::as_bytes);
    let host = host.and_then(|host| Authority::try_from(host).ok());
    authority.is_some() && authority == host
}

/// Whether the request comes from this server's own pages, or from an address that a user typed.
fn is_of_own_site(headers: &HeaderMap) -> bool {
    let site = headers.get(SITE);
    site.is_some_and(|site| site == "same-origin" || site == "none")
}

/// Whether a user follows a link to this server. The page with the link cannot read the answer.
fn is_visit(request: &Request) -> bool {
    let is = |name: HeaderName, value: &str| {
        let given = request.headers().get(name);
        given.is_some_and(|given| given == value)
    };
    matches!(*request.method(), Method::GET | Method::HEAD)
        && is(MODE, "navigate")
        && is(DESTINATION, "document")
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next());
    kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}
