//! The console: pages for browsers, which the server makes and which need no script.
//!
//! 1. `guard.rs` checks the host name of each request, and the origin of each change.
//! 2. `session.rs` finds the browser's session, and with it the token of its calls.
//! 3. A page calls the public API over a connection within the process (`caller.rs`), so that
//!    rights, quotas, limits and the audit log are those of any client. It makes a fixed number of
//!    calls, and its lists have pages.
//! 4. `page.rs` renders templates, which escape every text; `assets.rs` has the style and scripts.
//! 5. Changes (`changes.rs`) carry a second token from the form.

mod access;
mod assets;
mod caller;
mod changes;
mod chart;
mod cluster;
mod form;
mod group;
mod groups;
mod guard;
mod health;
mod history;
mod page;
mod position;
mod record_search;
mod record_text;
mod records;
mod session;
mod settings_form;
mod sign_in;
mod slow;
mod tail;
mod topic;
mod topics;

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Incoming};
use hyper::header::{ALLOW, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::Semaphore;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::node::Node;
use crate::transport::InProcessConnector;
use caller::ConsoleCaller;
pub use caller::ConsoleDial;
use form::FormFields;
use history::LoadHistory;
pub(super) use page::{AdminBody, full, is_tail};
use page::{PageFailure, redirect};
use session::{BrowserSession, SessionTable};

/// Bytes of a form.
const FORM_BYTES_MAX: usize = 16 << 10;

/// Live tails at a time.
const TAILS_MAX: usize = 16;

/// Settings of the console.
#[derive(Debug)]
pub struct ConsoleSettings {
    /// Host names by which browsers may call it, beside localhost and the port's address.
    pub hosts: Vec<String>,
    pub dial: ConsoleDial,
}

/// The browser's side of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Visitor {
    pub(super) peer: SocketAddr,
    /// Address that the connection came in at.
    pub(super) local: Option<SocketAddr>,
    pub(super) is_encrypted: bool,
}

/// The console of one node.
pub(super) struct Console {
    settings: ConsoleSettings,
    listener: SocketAddr,
    /// Set once the node is open.
    open: OnceLock<OpenConsole>,
    sessions: SessionTable,
    history: Arc<LoadHistory>,
    tails: Arc<Semaphore>,
    closing: CancellationToken,
    _closing: DropGuard,
}

struct OpenConsole {
    node: Arc<Node>,
    connector: InProcessConnector,
}

impl fmt::Debug for Console {
    /// Leaves out the sessions, which have tokens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// One request for a page or a change.
struct PageRequest {
    console: Arc<Console>,
    node: Arc<Node>,
    caller: ConsoleCaller,
    session: Option<Arc<BrowserSession>>,
    visitor: Visitor,
    /// Path with the query.
    target: String,
    query: FormFields,
    /// Offset of the last event that a browser has received of a tail.
    last_event: Option<u64>,
}

impl Console {
    pub(super) fn new(settings: ConsoleSettings, listener: SocketAddr) -> Self {
        let closing = CancellationToken::new();
        Self {
            settings,
            listener,
            open: OnceLock::new(),
            sessions: SessionTable::new(listener),
            history: Arc::default(),
            tails: Arc::new(Semaphore::new(TAILS_MAX)),
            _closing: closing.clone().drop_guard(),
            closing,
        }
    }

    /// Sets the node once it is open, and begins to sample it.
    pub(super) fn set_node(&self, node: &Arc<Node>, connector: InProcessConnector) {
        // Ignored: it is set once.
        let _ = self.open.set(OpenConsole { node: node.clone(), connector });
        let sampling = LoadHistory::follow(Arc::downgrade(&self.history), Arc::downgrade(node));
        tokio::spawn(self.closing.clone().run_until_cancelled_owned(sampling));
    }

    /// Responds to a request below `/console`.
    pub(super) async fn respond(
        self: &Arc<Self>,
        request: Request<Incoming>,
        visitor: Visitor,
    ) -> Response<AdminBody> {
        let mut response = self.checked(request, visitor).await;
        page::secure(response.headers_mut());
        response
    }

    async fn checked(
        self: &Arc<Self>,
        request: Request<Incoming>,
        visitor: Visitor,
    ) -> Response<AdminBody> {
        let addresses = guard::addresses(self.listener, visitor.local);
        let host = match guard::check_host(request.headers(), &self.settings.hosts, &addresses) {
            Ok(host) => host.to_owned(),
            Err(what) => return page::plain(StatusCode::MISDIRECTED_REQUEST, &what),
        };
        let path = request.uri().path().to_owned();
        if let Some(name) = path.strip_prefix("/console/static/") {
            return assets::respond(name);
        }
        if path == "/console" {
            return redirect(StatusCode::PERMANENT_REDIRECT, "/console/");
        }
        let is_change = match *request.method() {
            Method::GET => false,
            Method::POST => true,
            _ => {
                let what = "the console takes GET, and POST for changes";
                let mut response = page::plain(StatusCode::METHOD_NOT_ALLOWED, what);
                response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, POST"));
                return response;
            }
        };
        let Some(OpenConsole { node, connector }) = self.open.get() else {
            let what = "the node is starting; see /readyz";
            return page::plain(StatusCode::SERVICE_UNAVAILABLE, what);
        };
        let origin = guard::check_origin(request.headers(), &host, visitor.is_encrypted);
        if let Err(what) = origin
            && is_change
        {
            return page::plain(StatusCode::FORBIDDEN, &what);
        }
        let session = self.sessions.find(request.headers());
        let token = session.as_ref().map(|session| &*session.token);
        let (connector, dial) = (connector.clone(), self.settings.dial.clone());
        let caller = match ConsoleCaller::new(connector, visitor.peer, token, dial) {
            Ok(caller) => caller,
            Err(what) => return page::plain(StatusCode::BAD_REQUEST, &what),
        };
        let uri = request.uri();
        let page = PageRequest {
            console: self.clone(),
            node: node.clone(),
            caller,
            session,
            visitor,
            target: uri.path_and_query().map_or("/console/", |it| it.as_str()).to_owned(),
            query: FormFields::parse(uri.query().unwrap_or_default()),
            last_event: last_event(request.headers()),
        };
        let path = path.strip_prefix("/console/").unwrap_or_default();
        // Names of topics and groups have no other characters.
        let is_part = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
        if !path.chars().all(is_part) {
            return page.failed(PageFailure::not_found());
        }
        let segments: Vec<&str> = path.split('/').collect();
        let responded = match is_change {
            false if sign_in::needs_reload(&page, request.headers()) => sign_in::reload(),
            false => page.get(&segments).await,
            true => page.post(&segments, request).await,
        };
        responded.unwrap_or_else(|failure| page.failed(failure))
    }
}

impl PageRequest {
    async fn get(&self, segments: &[&str]) -> Result<Response<AdminBody>, PageFailure> {
        match segments {
            [""] => cluster::show(self).await,
            ["topics"] => topics::show(self).await,
            ["topics", name] => topic::show(self, name).await,
            ["topics", name, "records"] => records::show(self, name).await,
            ["topics", name, "value"] => records::download(self, name).await,
            ["topics", name, "tail"] => tail::show(self, name).await,
            ["topics", name, "events"] => tail::events(self, name).await,
            ["groups"] => groups::show(self).await,
            ["groups", name] => group::show(self, name).await,
            ["access"] => access::show(self).await,
            ["slow"] => slow::show(self).await,
            ["sign-in"] => sign_in::show(self),
            _ => Err(PageFailure::not_found()),
        }
    }

    async fn post(
        &self,
        segments: &[&str],
        request: Request<Incoming>,
    ) -> Result<Response<AdminBody>, PageFailure> {
        let (head, body) = request.into_parts();
        let too_long = || PageFailure::bad("the form has more than 16 KiB, or ended early");
        if body.size_hint().lower() > FORM_BYTES_MAX as u64 {
            return Err(too_long());
        }
        let read = Limited::new(body, FORM_BYTES_MAX).collect().await;
        let read = read.map_err(|_| too_long())?;
        let form = read.to_bytes();
        let form =
            std::str::from_utf8(&form).map_err(|_| PageFailure::bad("the form is not UTF-8"))?;
        let form = FormFields::parse(form);
        if !session::is_equal(form.raw("form_token"), self.form_token()) {
            return Err(PageFailure::stale_form());
        }
        match segments {
            ["sign-in"] => sign_in::sign_in(self, &form).await,
            ["sign-out"] => Ok(sign_in::sign_out(self, &head.headers)),
            segments => changes::change(self, segments, &form).await,
        }
    }

    /// Returns the token that the forms of this browser carry.
    fn form_token(&self) -> &str {
        match &self.session {
            Some(session) => &session.form_token,
            None => &self.console.sessions.open_form_token,
        }
    }
}

fn last_event(headers: &HeaderMap) -> Option<u64> {
    headers.get("last-event-id")?.to_str().ok()?.parse().ok()
}
