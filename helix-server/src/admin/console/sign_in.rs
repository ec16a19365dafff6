//! Sign-in: a token of the API becomes a session. The token is sent once, and stays in the server.

use askama::Template;
use helix_proto::log::v1::WhoAmIRequest;
use hyper::header::{HeaderMap, HeaderValue, SET_COOKIE};
use hyper::{Response, StatusCode};

use super::PageRequest;
use super::caller::{self, ConsoleCaller, FailedCall};
use super::form::FormFields;
use super::page::{AdminBody, PageFailure, PageFrame, html, plain, redirect, shown};
use super::session::TOKEN_BYTES_MAX;
use crate::access::AuthMode;

#[derive(Template)]
#[template(path = "sign_in.html")]
struct SignInPage {
    frame: PageFrame,
    message: String,
    /// Page to show afterwards.
    next: String,
    is_encrypted: bool,
}

/// A page that loads itself again.
#[derive(Template)]
#[template(path = "reload.html")]
struct ReloadPage {}

/// Returns true for a request without cookie that a page of another site has caused, such as a link
/// in a chat. The browser leaves out a cookie of the same site there, and sends it when this page
/// loads itself again.
pub(super) fn needs_reload(page: &PageRequest, headers: &HeaderMap) -> bool {
    let from_other = headers.get("sec-fetch-site").is_some_and(|site| site == "cross-site");
    from_other && page.session.is_none() && page.node.auth_mode() != AuthMode::Off
}

pub(super) fn reload() -> Result<Response<AdminBody>, PageFailure> {
    html(StatusCode::OK, &ReloadPage {})
}

/// Shows the form.
pub(super) fn show(page: &PageRequest) -> Result<Response<AdminBody>, PageFailure> {
    form(page, StatusCode::OK, "", page.query.get("next"))
}

/// Shows the form in place of a page that needs credentials.
pub(super) fn required(page: &PageRequest, message: &str) -> Response<AdminBody> {
    // A session may have outlived its token.
    let message = match (&page.session, message) {
        (None, _) => "",
        (Some(_), message) => message,
    };
    let shown = form(page, StatusCode::UNAUTHORIZED, message, &page.target);
    shown.unwrap_or_else(|failure| plain(failure.status, &failure.message))
}

fn form(
    page: &PageRequest,
    status: StatusCode,
    message: &str,
    next: &str,
) -> Result<Response<AdminBody>, PageFailure> {
    let shown = SignInPage {
        frame: page.frame("Sign in", ""),
        message: shown(message),
        next: own_path(next).to_owned(),
        is_encrypted: page.visitor.is_encrypted || page.visitor.peer.ip().is_loopback(),
    };
    html(status, &shown)
}

/// Opens a session, if the API knows the token.
pub(super) async fn sign_in(
    page: &PageRequest,
    fields: &FormFields,
) -> Result<Response<AdminBody>, PageFailure> {
    let (token, next) = (fields.get("token"), own_path(fields.get("next")));
    let refused = |status: StatusCode, message: &str| form(page, status, message, next);
    if page.node.auth_mode() == AuthMode::Off {
        let what = "this node does not check callers (--auth off); there is no need to sign in";
        return Err(PageFailure::bad(what));
    }
    if token.is_empty() || token.len() > TOKEN_BYTES_MAX {
        let what = "enter a token, of at most 8 KiB";
        return refused(StatusCode::BAD_REQUEST, what);
    }
    let Some(open) = page.console.open.get() else { return Err(PageFailure::not_found()) };
    let (connector, dial) = (open.connector.clone(), page.console.settings.dial.clone());
    let caller = match ConsoleCaller::new(connector, page.visitor.peer, Some(token), dial) {
        Ok(caller) => caller,
        Err(what) => return refused(StatusCode::BAD_REQUEST, &what),
    };
    let mut access = caller::access(caller.local());
    let found = match access.who_am_i(caller.request(WhoAmIRequest {})).await {
        Ok(found) => found.into_inner(),
        Err(status) => {
            let failed = FailedCall::from(status);
            return refused(failed.status, &failed.message);
        }
    };
    let is_encrypted = page.visitor.is_encrypted;
    let cookie = page.console.sessions.open(token, &shown(&found.principal), is_encrypted);
    Ok(with_cookie(redirect(StatusCode::SEE_OTHER, next), &cookie))
}

/// Closes the session.
pub(super) fn sign_out(page: &PageRequest, headers: &HeaderMap) -> Response<AdminBody> {
    let cookie = page.console.sessions.close(headers, page.visitor.is_encrypted);
    with_cookie(redirect(StatusCode::SEE_OTHER, "/console/"), &cookie)
}

fn with_cookie(mut response: Response<AdminBody>, cookie: &str) -> Response<AdminBody> {
    if let Ok(cookie) = HeaderValue::from_str(cookie) {
        response.headers_mut().insert(SET_COOKIE, cookie);
    }
    response
}

/// Returns the path if it is one of the console, else the first page.
fn own_path(path: &str) -> &str {
    let is_own = path.starts_with("/console/")
        && path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    if is_own { path } else { "/console/" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sign_in_leads_to_the_console_only() {
        assert_eq!(own_path("/console/topics?prefix=a"), "/console/topics?prefix=a");
        for path in ["", "//evil.example/", "https://evil.example/", "/\\evil.example", "/metrics"]
        {
            assert_eq!(own_path(path), "/console/", "{path}");
        }
        assert_eq!(own_path("/console/\r\nX: y"), "/console/");
    }
}
