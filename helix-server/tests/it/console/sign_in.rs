//! Sign-in with tokens: the rights of a page are those of its session.

use helix_client::AccessGrant;
use helix_proto::log::v1::{AccessRole, RoleGrant};
use helix_server::config::{AuthSetting, ServerConfig};

use super::{Answer, Browser, config};
use crate::access::GuardedServer;
use crate::captured_log::CapturedLog;

async fn guarded() -> (GuardedServer, Browser) {
    let auth = AuthSetting::Required;
    let guarded = GuardedServer::start_with(ServerConfig { auth, ..config() }).await;
    let browser = Browser::of(&guarded.server);
    (guarded, browser)
}

impl Browser {
    /// Sends the form with a token, and keeps the cookie.
    async fn sign_in(&mut self, token: &str) -> Answer {
        let answer = self.post("/console/sign-in", &format!("token={token}")).await;
        if let Some(cookie) = answer.header("set-cookie") {
            self.cookie = cookie.split(';').next().unwrap_or_default().to_owned();
        }
        answer
    }
}

#[tokio::test]
async fn pages_need_a_session_and_have_its_rights() {
    let (guarded, mut browser) = guarded().await;
    for path in ["/console/", "/console/topics", "/console/groups/x", "/console/access"] {
        browser.get(path).await.expect(401, "name=\"token\"");
    }
    let wrong = browser.sign_in("hlx_wrong").await;
    wrong.expect(401, "role=\"alert\"");
    assert_eq!(wrong.header("set-cookie"), None);
    browser.sign_in("").await.expect(400, "enter a token");
    browser.sign_in(&"x".repeat(9_000)).await.expect(400, "at most 8 KiB");

    let signed_in = browser.sign_in(&guarded.admin_token).await;
    let cookie = signed_in.header("set-cookie").unwrap().to_owned();
    for part in ["; HttpOnly", "; SameSite=Strict", "; Path=/console"] {
        assert!(cookie.contains(part), "{cookie}");
    }
    assert!(cookie.starts_with(&format!("helix-console-{}=", browser.addr.port())), "{cookie}");
    assert!(!cookie.contains(&guarded.admin_token));
    for path in ["/console/", "/console/topics", "/console/access"] {
        let page = browser.get(path).await;
        page.expect(200, "Sign out");
        assert!(!page.body.contains(&guarded.admin_token), "{path}");
    }
    // A form of another session changes nothing.
    let other = Browser { addr: browser.addr, cookie: String::new() };
    let form_token = other.get("/console/sign-in").await.form_token();
    let form = format!("form_token={form_token}&name=made&partitions=1");
    let refused = browser.post_raw("/console/topics", &browser.own_headers(), &form).await;
    refused.expect(403, "nothing was changed");
    let made = browser.post("/console/topics", "name=made&partitions=1").await;
    assert_eq!(made.status, 303, "{made}");

    let out = browser.post("/console/sign-out", "").await;
    assert!(out.header("set-cookie").unwrap().contains("Max-Age=0"), "{out}");
    browser.get("/console/topics").await.expect(401, "name=\"token\"");
}

#[tokio::test]
async fn a_reader_of_one_topic_sees_and_changes_no_other() {
    let (guarded, mut browser) = guarded().await;
    browser.sign_in(&guarded.admin_token).await;
    browser.post("/console/topics", "name=secret&partitions=1").await;
    let role = RoleGrant {
        role: AccessRole::Consumer.into(),
        name: "default".to_owned(),
        is_prefix: false,
    };
    let grant = AccessGrant { roles: vec![role], ..AccessGrant::default() };
    let token = guarded.token("reader", &grant).await;
    let mut reader = Browser { addr: browser.addr, cookie: String::new() };
    reader.sign_in(&token).await;
    let list = reader.get("/console/topics").await;
    list.expect(200, "/console/topics/default").expect(200, "reader");
    assert!(!list.body.contains("secret"), "{list}");
    reader.get("/console/topics/default/records").await.expect(200, "has no records");
    reader.get("/console/topics/secret").await.expect(403, "PERMISSION_DENIED");
    reader.get("/console/topics/secret/records").await.expect(403, "PERMISSION_DENIED");
    reader.get("/console/topics/secret/events").await.expect(403, "PERMISSION_DENIED");
    let delete = reader.post("/console/topics/default/delete", "confirm=default&topic_id=0").await;
    delete.expect(403, "PERMISSION_DENIED").expect(403, "helix topic delete default");
    reader.get("/console/access").await.expect(200, "You are reader.");
    // The slowest calls are for callers that may describe the cluster.
    reader.get("/console/slow").await.expect(403, "PERMISSION_DENIED");
    browser.get("/console/slow").await.expect(200, "Slow appends and reads");
    // An administrator sees what was refused, and no token.
    let other = Browser { addr: browser.addr, cookie: String::new() };
    other.get("/console/topics").await.expect(401, "name=\"token\"");
    let access = browser.get("/console/access").await;
    access.expect(200, "describe topic secret").expect(200, "delete topic default");
    access.expect(200, "missing");
    assert!(!access.body.contains(&token) && !access.body.contains(&guarded.admin_token));
    let of_reader = browser.get("/console/access?principal=reader").await;
    of_reader.expect(200, "describe topic secret");
    reader.get("/console/access").await.expect(200, "admin cluster");
}

#[tokio::test]
async fn the_audit_log_names_the_console() {
    let (log, _guard) = CapturedLog::capture();
    let (guarded, mut browser) = guarded().await;
    browser.sign_in(&guarded.admin_token).await;
    browser.post("/console/topics", "name=audited&partitions=1").await;
    let lines = log.text();
    let line = lines.lines().find(|line| line.contains("create topic audited"));
    let line = line.unwrap_or_else(|| panic!("{lines}"));
    assert!(line.contains("console:127.0.0.1:") && line.contains("helix-console/"), "{line}");
}

#[tokio::test]
async fn a_link_from_another_site_loads_again_with_the_session() {
    let (_guarded, browser) = guarded().await;
    let linked = browser.get_with("/console/topics", "Sec-Fetch-Site: cross-site\r\n").await;
    linked.expect(200, "http-equiv=\"refresh\"");
    browser
        .get_with("/console/topics", "Sec-Fetch-Site: same-origin\r\n")
        .await
        .expect(401, "Token");
}
