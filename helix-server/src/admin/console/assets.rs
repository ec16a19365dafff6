//! Files of the console that do not change while the server runs: they are a part of the program.

use hyper::header::{CACHE_CONTROL, HeaderValue};
use hyper::{Response, StatusCode};

use super::page::{AdminBody, full, plain, response};

/// Part of the files' addresses, so that a browser takes those of a new version.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Name, content type and content.
const FILES: [(&str, &str, &str); 3] = [
    ("console.css", "text/css; charset=utf-8", include_str!("assets/console.css")),
    ("console.js", SCRIPT, include_str!("assets/console.js")),
    ("icon.svg", "image/svg+xml", include_str!("assets/icon.svg")),
];

/// Returns a file by its name.
pub(super) fn respond(name: &str) -> Response<AdminBody> {
    let Some((_, content_type, content)) = FILES.iter().find(|(known, ..)| *known == name) else {
        return plain(StatusCode::NOT_FOUND, "the console has no such file");
    };
    let mut response = response(StatusCode::OK, content_type, full(*content));
    // Not for longer, since a version in development changes them.
    let kept = HeaderValue::from_static("max-age=600");
    response.headers_mut().insert(CACHE_CONTROL, kept);
    response
}
