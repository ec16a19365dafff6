//! Responses of the console: rendered templates, redirects and failures, and the headers of all.

use std::convert::Infallible;
use std::time::Duration;

use askama::Template;
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue,
    LOCATION, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Response, StatusCode};

use super::PageRequest;
use super::caller::FailedCall;
use crate::access::AuthMode;

/// Body of a response of the admin port.
pub(in crate::admin) type AdminBody = UnsyncBoxBody<Bytes, Infallible>;

/// Rows of a page of a list.
pub(super) const ROWS_PER_PAGE: i32 = 100;

/// Own files only, and no inline script or style: a text that became markup would do nothing.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; form-action 'self'; base-uri 'none'; \
                      frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
pub(super) const EVENTS: &str = "text/event-stream";

/// Returns a whole body.
pub(in crate::admin) fn full(body: impl Into<Bytes>) -> AdminBody {
    Full::new(body.into()).boxed_unsync()
}

/// Returns true for a response that goes on for minutes.
pub(in crate::admin) fn is_tail(response: &Response<AdminBody>) -> bool {
    response.headers().get(CONTENT_TYPE).is_some_and(|it| it == EVENTS)
}

/// Adds the headers that every response of the console has.
pub(super) fn secure(headers: &mut HeaderMap) {
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    let opener = HeaderName::from_static("cross-origin-opener-policy");
    headers.insert(opener, HeaderValue::from_static("same-origin"));
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
}

/// Returns a response with a body of this type.
pub(super) fn response(
    status: StatusCode,
    content_type: &'static str,
    body: AdminBody,
) -> Response<AdminBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Returns a line of text, for requests that get no page.
pub(super) fn plain(status: StatusCode, what: &str) -> Response<AdminBody> {
    response(status, "text/plain; charset=utf-8", full(format!("{what}\n")))
}

/// Returns a redirect to a path of the console.
pub(super) fn redirect(status: StatusCode, path: &str) -> Response<AdminBody> {
    let mut response = plain(status, path);
    // A path that is no header value has a character that no name has.
    let location = HeaderValue::from_str(path);
    let location = location.unwrap_or(HeaderValue::from_static("/console/"));
    response.headers_mut().insert(LOCATION, location);
    response
}

/// Returns a rendered page.
///
/// # Errors
/// The template could not be rendered.
pub(super) fn html(
    status: StatusCode,
    page: &impl Template,
) -> Result<Response<AdminBody>, PageFailure> {
    let rendered = page.render().map_err(|error| PageFailure {
        title: "Not shown",
        message: format!("the page could not be made: {error}"),
        ..PageFailure::of(StatusCode::INTERNAL_SERVER_ERROR)
    })?;
    Ok(response(status, HTML, full(rendered)))
}

/// The parts that all pages share.
#[derive(Debug)]
pub(super) struct PageFrame {
    pub(super) title: String,
    /// Entry of the navigation that is marked.
    pub(super) section: &'static str,
    pub(super) node_id: u64,
    /// Principal of the session.
    pub(super) principal: Option<String>,
    /// False if callers are not checked.
    pub(super) can_sign_in: bool,
    pub(super) form_token: String,
    pub(super) notice: &'static str,
    /// Seconds between two updates by script; 0 for none.
    pub(super) refresh_seconds: u32,
    pub(super) version: &'static str,
}

/// Texts of the query field `done`. Only these are shown, so that a link cannot carry others.
const NOTICES: [(&str, &str); 10] = [
    ("created", "The topic was created."),
    ("altered", "The settings were changed."),
    ("extended", "The partitions were added."),
    ("deleted", "The topic and its records were deleted."),
    ("sought", "The offsets of the group were set."),
    ("undone", "The last seek was taken back."),
    ("group-deleted", "The group and its offsets were deleted."),
    ("transferred", "The leadership was transferred."),
    ("draining", "The node drains: its leaderships move to other nodes."),
    ("undrained", "The node may lead shards again."),
];

impl PageRequest {
    /// Returns the frame of a page.
    pub(super) fn frame(&self, title: impl Into<String>, section: &'static str) -> PageFrame {
        let done = self.query.get("done");
        let notice = NOTICES.iter().find(|(code, _)| *code == done).map_or("", |(_, text)| text);
        PageFrame {
            title: title.into(),
            section,
            node_id: self.node.info().node_id,
            principal: self.session.as_ref().map(|session| session.principal.to_string()),
            can_sign_in: self.node.auth_mode() != AuthMode::Off,
            form_token: self.form_token().to_owned(),
            notice,
            refresh_seconds: 0,
            version: super::assets::VERSION,
        }
    }

    /// Returns the page of a failure; a caller without credentials gets the form to sign in.
    pub(super) fn failed(&self, failure: PageFailure) -> Response<AdminBody> {
        if failure.status == StatusCode::UNAUTHORIZED {
            return super::sign_in::required(self, &failure.message);
        }
        let status = failure.status;
        let page = FailurePage { frame: self.frame(failure.title, ""), failure };
        let shown = html(status, &page);
        shown.unwrap_or_else(|failure| plain(failure.status, &failure.message))
    }
}

/// A request without result, as its page shows it.
#[derive(Debug)]
pub(super) struct PageFailure {
    pub(super) status: StatusCode,
    pub(super) title: &'static str,
    /// Reason of the API, or empty.
    pub(super) reason: String,
    pub(super) message: String,
    /// Command that does the same, if the failure is one of a change.
    pub(super) command: String,
    /// Page to go back to, and its name.
    pub(super) back: Box<(String, String)>,
}

impl PageFailure {
    pub(super) fn of(status: StatusCode) -> Self {
        Self {
            status,
            title: "Not done",
            reason: String::new(),
            message: String::new(),
            command: String::new(),
            back: Box::new(("/console/".to_owned(), "the cluster".to_owned())),
        }
    }

    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::of(StatusCode::BAD_REQUEST) }
    }

    pub(super) fn not_found() -> Self {
        let message = "the console has no such page; begin at the cluster, topics or groups";
        Self {
            title: "No such page",
            message: message.to_owned(),
            ..Self::of(StatusCode::NOT_FOUND)
        }
    }

    pub(super) fn stale_form() -> Self {
        let message = "the form is older than the session, or not from a page of the console; \
                       nothing was changed. Reload the page that has the form and try again";
        Self { message: message.to_owned(), ..Self::of(StatusCode::FORBIDDEN) }
    }

    /// Sets the page to go back to.
    pub(super) fn back_to(self, path: impl Into<String>, name: impl Into<String>) -> Self {
        Self { back: Box::new((path.into(), name.into())), ..self }
    }
}

impl From<FailedCall> for PageFailure {
    fn from(call: FailedCall) -> Self {
        let FailedCall { status, reason, message, .. } = call;
        let title = match status {
            StatusCode::NOT_FOUND => "Not found",
            StatusCode::FORBIDDEN => "Not allowed",
            _ => "Not done",
        };
        Self { title, reason, message, ..Self::of(status) }
    }
}

impl From<tonic::Status> for PageFailure {
    fn from(status: tonic::Status) -> Self {
        FailedCall::from(status).into()
    }
}

#[derive(Template)]
#[template(path = "failure.html")]
struct FailurePage {
    frame: PageFrame,
    failure: PageFailure,
}

/// Returns a text of other users as one line without characters that could deceive a reader.
pub(super) fn shown(text: &str) -> String {
    helix_proto::shown::one_line(text).into_owned()
}

/// Returns a time as `2026-01-31 10:00:00 UTC`; empty without one.
pub(super) fn time(time: Option<&prost_types::Timestamp>) -> String {
    let Some(time) = time else { return String::new() };
    let whole = prost_types::Timestamp { nanos: 0, ..*time };
    whole.to_string().replace('T', " ").replace('Z', " UTC")
}

/// Returns a duration of the wire, if it is a valid one.
pub(super) fn duration(wire: Option<prost_types::Duration>) -> Option<Duration> {
    wire.and_then(|wire| helix_proto::time::duration(wire).ok())
}

/// Returns a text as one argument of a shell.
pub(super) fn argument(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:@,=+".contains(&byte);
    if !text.is_empty() && text.bytes().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_quoted_for_a_shell() {
        assert_eq!(argument("orders-1"), "orders-1");
        assert_eq!(argument(""), "''");
        assert_eq!(argument("a b; rm -rf /"), "'a b; rm -rf /'");
        assert_eq!(argument("it's"), r"'it'\''s'");
    }

    #[test]
    fn times_are_shown_without_fractions() {
        let at = prost_types::Timestamp { seconds: 1_769_853_600, nanos: 123_000_000 };
        assert_eq!(time(Some(&at)), "2026-01-31 10:00:00 UTC");
        assert_eq!(time(None), "");
    }

    #[test]
    fn a_redirect_stays_a_header() {
        let response = redirect(StatusCode::SEE_OTHER, "/console/\r\nSet-Cookie: a=b");
        assert_eq!(response.headers()[LOCATION], "/console/");
    }
}
