//! The console of the admin port, over plain HTTP as a browser without scripts speaks it.

mod changes;
mod sign_in;

use std::net::SocketAddr;

use bytes::Bytes;
use helix_client::Client;
use helix_proto::batch;
use helix_proto::log::v1::{AppendRequest, CommitOffsetsRequest, Record};
use helix_server::config::{AdminAddr, ConsoleUse, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::admin::any_port;
use crate::groups::{TestMember, commit_at, groups};
use crate::support::{TestServer, append_request, as_batch, soon};
use crate::trio::{Trio, until};

/// Bytes that a page may have.
const PAGE_BYTES_MAX: usize = 200 << 10;

/// A response of the console.
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let mut fields = self.head.lines().filter_map(|line| line.split_once(": "));
        fields.find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// Expects a page with this status and text.
    fn expect(&self, status: u16, text: &str) -> &Self {
        assert!(self.status == status && self.body.contains(text), "{status} {text}: {self}");
        self
    }

    /// Returns the token that forms of the page carry.
    fn form_token(&self) -> String {
        let (_, rest) = self.body.split_once("name=\"form_token\" value=\"").expect("a form");
        rest.split('"').next().unwrap_or_default().to_owned()
    }
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\n\n{}", self.head, self.body)
    }
}

/// A browser: its console, and its cookie.
struct Browser {
    addr: SocketAddr,
    cookie: String,
}

impl Browser {
    fn of(server: &TestServer) -> Self {
        let addr = server.running.admin_addr().expect("it has an admin port");
        Self { addr, cookie: String::new() }
    }

    async fn send(&self, request: String) -> Answer {
        let mut stream = TcpStream::connect(self.addr).await.unwrap();
        // A server that refuses early may have closed the connection already.
        let _ = stream.write_all(request.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = soon(stream.read_to_end(&mut answer)).await;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer with a head");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Answer { status: status.expect("a status"), head: head.to_owned(), body: body.to_owned() }
    }

    /// Requests a page with further headers.
    async fn get_with(&self, path: &str, headers: &str) -> Answer {
        let Self { addr, cookie } = self;
        let cookie =
            if cookie.is_empty() { String::new() } else { format!("Cookie: {cookie}\r\n") };
        self.send(format!("GET {path} HTTP/1.1\r\nHost: {addr}\r\n{cookie}{headers}\r\n")).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.get_with(path, "").await
    }

    /// Sends a form with these headers, as it is.
    async fn post_raw(&self, path: &str, headers: &str, form: &str) -> Answer {
        let length = form.len();
        let cookie = &self.cookie;
        let head = format!(
            "POST {path} HTTP/1.1\r\nContent-Type: application/x-www-form-urlencoded\r\n\
             Content-Length: {length}\r\nCookie: {cookie}\r\n{headers}\r\n"
        );
        self.send(head + form).await
    }

    /// Sends a form as a page of the console does.
    async fn post(&self, path: &str, form: &str) -> Answer {
        let token = self.get("/console/sign-in").await.form_token();
        let token = format!("{form}&form_token={token}");
        self.post_raw(path, &self.own_headers(), &token).await
    }

    fn own_headers(&self) -> String {
        format!("Host: {0}\r\nOrigin: http://{0}\r\n", self.addr)
    }
}

fn config() -> ServerConfig {
    ServerConfig { admin_addr: any_port(), ..ServerConfig::in_memory() }
}

async fn served() -> (TestServer, Browser) {
    let server = TestServer::start(config(), None).await;
    let browser = Browser::of(&server);
    (server, browser)
}

/// Appends one record with this key and value to partition 0.
async fn append_record(server: &TestServer, key: &str, value: &[u8]) {
    let record = Record {
        key: Some(Bytes::copy_from_slice(key.as_bytes())),
        value: Some(Bytes::copy_from_slice(value)),
        ..Record::default()
    };
    let batch = as_batch(batch::encode(&[record]));
    let request = AppendRequest { batch, ..append_request(&["x"]) };
    server.produce().append(request).await.unwrap();
}

/// Commits offset 1 of partition 0 for the group `readers`.
async fn commit(server: &TestServer) {
    let request = CommitOffsetsRequest {
        group: "readers".to_owned(),
        offsets: vec![commit_at(0, 1)],
        ..CommitOffsetsRequest::default()
    };
    groups(server).commit_offsets(request).await.unwrap();
}

/// Expects a page without anything that the content policy forbids, and with its headers.
fn expect_strict(path: &str, answer: &Answer) {
    let policy = answer.header("content-security-policy").expect("a policy");
    for part in ["default-src 'none'", "script-src 'self'", "style-src 'self'"] {
        assert!(policy.contains(part), "{path}: {policy}");
    }
    assert!(
        policy.contains("frame-ancestors 'none'") && !policy.contains(concat!("un", "safe")),
        "{policy}"
    );
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{path}");
    assert_eq!(answer.header("referrer-policy"), Some("same-origin"), "{path}");
    let body = &answer.body;
    assert!(!body.contains("<style") && !body.contains(" style=\""), "{path}");
    assert!(!body.contains("javascript:") && !body.contains("http://"), "{path}");
    for script in body.split("<script").skip(1) {
        assert!(script.starts_with(" type=\"module\" src=\"/console/static/"), "{path}");
    }
    let handlers = [" onclick", " onload", " onerror", " onsubmit"];
    for tag in body.split('<').map(|tag| tag.split('>').next().unwrap_or_default()) {
        assert!(!handlers.iter().any(|handler| tag.contains(handler)), "{path}: {tag}");
    }
}

#[tokio::test]
async fn every_page_is_whole_without_scripts() {
    let (server, browser) = served().await;
    server.append(&["one", "{\"two\":[2]}", "three"]).await;
    commit(&server).await;
    let mut member = TestMember::new("member-1", &["default"]);
    member.until_owns(&server, 4).await;
    for (path, texts) in [
        (
            "/console/",
            &["healthy: the node answers", "Shards", "Appended", "helix cluster drain 1"]
                as &[&str],
        ),
        ("/console/topics", &["/console/topics/default", "helix topic create"]),
        ("/console/topics?prefix=def", &["/console/topics/default"]),
        ("/console/topics?prefix=none", &["No topic begins with"]),
        (
            "/console/topics/default",
            &["4 partitions", "Retention time", "helix topic delete", "/console/groups/readers"],
        ),
        ("/console/topics/default/records", &["one", "three", "helix consume default"]),
        ("/console/topics/default/records?from=1&count=1", &["&#34;two&#34;: [", "download"]),
        ("/console/topics/default/records?from=0&view=hex", &["000000  6f 6e 65"]),
        ("/console/topics/default/records?partition=3", &["has no records"]),
        ("/console/topics/default/tail", &["three", "Reload the page", "data-tail=\"/console/"]),
        (
            "/console/topics/default/records?key=&text=two",
            &["1 match among 3 records up to the end", "&#34;two&#34;"],
        ),
        ("/console/topics/default/records?text=none&from=1", &["0 matches among 2 records"]),
        ("/console/slow", &["append", "read", "default</a>/0", "queue", "helix trace append"]),
        ("/console/slow?kind=append", &["default</a>/0", "settle"]),
        ("/console/groups", &["/console/groups/readers", "stable"]),
        ("/console/groups?prefix=x", &["No group begins with"]),
        ("/console/groups/readers", &["default</a>/0", "2 records behind the end", "member-1"]),
        ("/console/access", &["You call without credentials", "helix acl list"]),
        ("/console/sign-in", &["Token", "Sign in"]),
    ] {
        let answer = browser.get(path).await;
        for text in texts {
            answer.expect(200, text);
        }
        expect_strict(path, &answer);
        assert!(answer.body.starts_with("<!doctype html>"), "{path}: {}", answer.body);
        assert!(answer.body.len() <= PAGE_BYTES_MAX, "{path}: {}", answer.body.len());
    }
    for (name, content_type) in
        [("console.css", "text/css"), ("console.js", "text/javascript"), ("icon.svg", "image/svg")]
    {
        let file = browser.get(&format!("/console/static/{name}?v=1")).await;
        assert_eq!(file.status, 200);
        assert!(file.header("content-type").unwrap().starts_with(content_type));
    }
    let moved = browser.get("/console").await;
    assert_eq!((moved.status, moved.header("location")), (308, Some("/console/")));
}

#[tokio::test]
async fn texts_of_others_are_no_markup() {
    let (server, browser) = served().await;
    let script = "<script>document.title='owned'</script>";
    append_record(&server, "\"><img src=x onerror=alert(1)>", script.as_bytes()).await;
    append_record(&server, "k", format!("{{\"a\":\"{script}\"}}").as_bytes()).await;
    append_record(&server, "k", b"a\x1b[2J\xe2\x80\xaeb and some text").await;
    let mut member = TestMember::new("member-1", &["default"]);
    member.request.client_name = format!("{script}\u{202e}");
    member.until_owns(&server, 4).await;
    for path in [
        "/console/topics/default/records?from=0",
        "/console/topics/default/records?from=0&view=text",
        "/console/topics/default/records?from=0&view=json",
        "/console/topics/default/records?from=0&view=hex",
        "/console/topics/default/tail",
        "/console/groups/readers",
    ] {
        let answer = browser.get(path).await;
        assert_eq!(answer.status, 200, "{path}: {answer}");
        expect_strict(path, &answer);
        assert!(!answer.body.contains("<script>") && !answer.body.contains("<img"), "{path}");
        assert!(!answer.body.contains(['\u{1b}', '\u{202e}']), "{path}");
    }
    let shown = browser.get("/console/topics/default/records?from=0").await;
    shown.expect(200, "&#60;script&#62;document.title=&#39;owned&#39;");
    shown.expect(200, "a\\u{1b}[2J\\u{202e}b");
    let echoed = "/console/topics?prefix=%22%3E%3Cscript%3Ealert(1)%3C%2Fscript%3E";
    let echo = browser.get(echoed).await;
    assert!(!echo.body.contains("<script>"), "{echo}");
    echo.expect(200, "&#34;&#62;&#60;script&#62;");
    // A value is a file that no browser shows.
    let value = browser.get("/console/topics/default/value?partition=0&offset=0").await;
    assert_eq!((value.status, &*value.body), (200, script));
    assert_eq!(value.header("content-type"), Some("application/octet-stream"));
    let disposition = value.header("content-disposition").unwrap();
    assert_eq!(disposition, "attachment; filename=\"default-0-0.bin\"");
    browser.get("/console/topics/default/value?offset=9").await.expect(404, "has no record");
}

#[tokio::test]
async fn pages_of_other_sites_are_kept_out() {
    let (_server, browser) = served().await;
    let port = browser.addr.port();
    let get = async |host: &str| {
        let request = format!("GET /console/ HTTP/1.1\r\nHost: {host}\r\n\r\n");
        browser.send(request).await.status
    };
    for host in [format!("localhost:{port}"), format!("127.0.0.1:{port}"), "[::1]".to_owned()] {
        assert_eq!(get(&host).await, 200, "{host}");
    }
    for host in ["evil.example", "localhost.evil.example", "192.0.2.1", "helix"] {
        assert_eq!(get(host).await, 421, "{host}");
    }
    let token = browser.get("/console/topics").await.form_token();
    let form = format!("form_token={token}&name=made&partitions=1");
    let addr = browser.addr;
    for (headers, why) in [
        (format!("Host: {addr}\r\n"), "has no origin"),
        (format!("Host: {addr}\r\nOrigin: null\r\n"), "origin"),
        (format!("Host: {addr}\r\nOrigin: http://evil.example\r\n"), "evil.example"),
        (format!("Host: {addr}\r\nOrigin: https://{addr}\r\n"), "origin"),
        (format!("Host: localhost:{port}\r\nOrigin: http://{addr}\r\n"), "origin"),
    ] {
        browser.post_raw("/console/topics", &headers, &form).await.expect(403, why);
    }
    for form in ["name=made&partitions=1", "name=made&form_token=", "name=made&form_token=guess"] {
        let refused = browser.post_raw("/console/topics", &browser.own_headers(), form).await;
        refused.expect(403, "nothing was changed");
    }
    browser.get("/console/topics/made").await.expect(404, "TOPIC_NOT_FOUND");
    let made = browser.post_raw("/console/topics", &browser.own_headers(), &form).await;
    assert_eq!(made.status, 303, "{made}");
}

#[tokio::test]
async fn the_console_is_off_where_it_is_not_wanted() {
    let console = Some(ConsoleUse::Off);
    let server = TestServer::start(ServerConfig { console, ..config() }, None).await;
    let browser = Browser::of(&server);
    for path in ["/console", "/console/", "/console/static/console.js"] {
        browser.get(path).await.expect(404, "--console on");
    }
    browser.get("/livez").await.expect(200, "alive");
    // On all addresses it is off, unless it is turned on.
    let admin_addr = Some(AdminAddr::At(SocketAddr::from(([0, 0, 0, 0], 0))));
    let open = ServerConfig { admin_addr, insecure: true, ..ServerConfig::in_memory() };
    let server = TestServer::start(open.clone(), None).await;
    let local = |server: &TestServer| {
        let port = server.running.admin_addr().unwrap().port();
        Browser { addr: SocketAddr::from(([127, 0, 0, 1], port)), cookie: String::new() }
    };
    local(&server).get("/console/").await.expect(404, "--console on");
    let console_hosts = vec!["console.example".to_owned()];
    let open = ServerConfig { console: Some(ConsoleUse::On), console_hosts, ..open };
    let server = TestServer::start(open, None).await;
    let browser = local(&server);
    browser.get("/console/").await.expect(200, "healthy");
    let by_name = "GET /console/ HTTP/1.1\r\nHost: console.example\r\n\r\n".to_owned();
    browser.send(by_name).await.expect(200, "healthy");
}

#[tokio::test]
async fn bad_requests_get_a_page_that_says_what_is_wrong() {
    let (server, browser) = served().await;
    server.append(&["one"]).await;
    for (path, status, text) in [
        ("/console/nothing", 404, "no such page"),
        ("/console/topics/a/b/c", 404, "no such page"),
        ("/console/topics/%3Cscript%3E", 404, "no such page"),
        ("/console/topics/none", 404, "TOPIC_NOT_FOUND"),
        ("/console/groups/none", 404, "GROUP_NOT_FOUND"),
        ("/console/static/none", 404, "no such file"),
        ("/console/topics/default?first=x", 400, "first &#34;x&#34; is not a number"),
        ("/console/topics/default/records?partition=x", 400, "is not a number in 0..=4294967295"),
        ("/console/topics/default/records?partition=9", 404, "PARTITION_NOT_FOUND"),
        ("/console/topics/default/records?from=soon", 400, "invalid position"),
        ("/console/topics/default/records?count=51", 400, "is not a number in 0..=50"),
        ("/console/topics/default/records?view=pdf", 400, "use auto, text, json or hex"),
        ("/console/topics/default/value?offset=-1", 400, "is not a number"),
        ("/console/topics/none/tail", 404, "TOPIC_NOT_FOUND"),
        ("/console/topics/none/events", 404, "TOPIC_NOT_FOUND"),
        ("/console/topics/default/events?from=x", 400, "is not a number"),
        ("/console/slow?kind=fast", 400, "kind is one of append, read"),
    ] {
        let answer = browser.get(path).await;
        answer.expect(status, text);
        assert!(!answer.body.contains("<script>"), "{path}");
    }
    // Positions outside of the partition become the nearest ones.
    browser.get("/console/topics/default/records?from=99").await.expect(200, "no records");
    browser.get("/console/topics/default/records?from=@2999-01-01").await.expect(200, "no records");
    let long_text = "x".repeat(1_025);
    let long_search = format!("/console/topics/default/records?text={long_text}");
    browser.get(&long_search).await.expect(400, "the limit is 1024");
    let long = "x".repeat(64 << 10);
    let refused = browser.post_raw("/console/topics", &browser.own_headers(), &long).await;
    refused.expect(400, "16 KiB");
    let endless = format!(
        "POST /console/topics HTTP/1.1\r\n{}Content-Length: 99999999999\r\n\r\n",
        browser.own_headers()
    );
    browser.send(endless).await.expect(400, "16 KiB");
    let wrong = browser.post_raw("/console/topics", &browser.own_headers(), "a=\u{0}%ff").await;
    assert_eq!(wrong.status, 403, "{wrong}");
    browser.get("/console/").await.expect(200, "healthy");
}

/// `HELIX_ROUNDS=5` has 10,000 topics and 5,000 groups.
#[tokio::test]
async fn lists_of_many_topics_and_groups_have_small_pages() {
    let rounds = std::env::var("HELIX_ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    let rounds: usize = rounds.unwrap_or(1);
    let group_count = 1_000 * rounds;
    let topics = (0..2_000 * rounds).map(|number| (format!("topic-{number:05}"), 1)).collect();
    let server = TestServer::start(ServerConfig { topics, ..config() }, None).await;
    let browser = Browser::of(&server);
    for path in ["/console/", "/console/topics", "/console/topics?prefix=topic-011"] {
        let answer = browser.get(path).await;
        assert!(answer.status == 200 && answer.body.len() <= PAGE_BYTES_MAX, "{path}: {answer}");
    }
    let mut path = "/console/topics?prefix=topic-01".to_owned();
    let mut seen = 0;
    loop {
        let page = browser.get(&path).await;
        let rows = page.body.matches("<th scope=\"row\">").count();
        assert!(rows <= 100, "{rows}");
        seen += rows;
        let Some((_, next)) = page.body.split_once("rel=\"next\" href=\"") else { break };
        path = next.split('"').next().unwrap().replace("&#38;", "&");
    }
    assert_eq!(seen, 1_000);
    let commit = async |number: usize| {
        let partition = helix_proto::log::v1::TopicPartition {
            topic: "topic-00000".to_owned(),
            ..Default::default()
        };
        let offset = helix_proto::log::v1::CommittedOffset {
            partition: Some(partition),
            ..Default::default()
        };
        let request = CommitOffsetsRequest {
            group: format!("group-{number:04}"),
            offsets: vec![offset],
            ..CommitOffsetsRequest::default()
        };
        groups(&server).commit_offsets(request).await.unwrap();
    };
    for first in (0..group_count).step_by(100) {
        futures_util::future::join_all((first..first + 100).map(&commit)).await;
    }
    let first = browser.get("/console/groups").await;
    assert_eq!(first.body.matches("<th scope=\"row\">").count(), 100);
    first.expect(200, "after=group-0099");
    let found = browser.get("/console/groups?prefix=group-011").await;
    assert_eq!(found.body.matches("<th scope=\"row\">").count(), 10);
    let topic = browser.get("/console/topics/topic-00000").await;
    topic.expect(200, "groups=group-0099#groups");
    let rest = browser.get("/console/topics/topic-00000?groups=group-9999").await;
    rest.expect(200, "No group has an offset");
    for path in [
        "/console/",
        "/console/topics",
        "/console/topics?prefix=topic-05&after=topic-05000",
        "/console/topics/topic-00000",
        "/console/topics/topic-00000/records",
        "/console/groups",
        "/console/groups?prefix=group-4",
        "/console/groups/group-0500",
        "/console/slow",
        "/console/access",
    ] {
        let began = tokio::time::Instant::now();
        let page = browser.get(path).await;
        let took = began.elapsed();
        // For people: a bound would depend on how busy the machine is.
        println!("{path}: {} bytes in {took:?}", page.body.len());
        assert!(page.status == 200 && page.body.len() <= PAGE_BYTES_MAX, "{path}: {page}");
    }
}

#[tokio::test]
async fn a_search_goes_on_from_page_to_page() {
    let (server, browser) = served().await;
    let values: Vec<String> = (0..12_000).map(|number| format!("value {number}")).collect();
    for part in values.chunks(1_000) {
        let part: Vec<&str> = part.iter().map(String::as_str).collect();
        server.append(&part).await;
    }
    append_record(&server, "customer-7", b"the last one").await;
    let mut path = "/console/topics/default/records?text=99&count=50".to_owned();
    let (mut pages, mut matches) = (0, 0);
    loop {
        let page = browser.get(&path).await;
        page.expect(200, "among");
        pages += 1;
        matches += page.body.matches("class=\"record\"").count();
        let Some((_, next)) = page.body.split_once("rel=\"next\" href=\"") else { break };
        path = next.split('"').next().unwrap().replace("&#38;", "&");
        assert!(path.contains("text=99"), "{path}");
    }
    let expected = values.iter().filter(|value| value.contains("99")).count();
    assert_eq!(
        (matches, pages),
        (expected, expected.div_ceil(50) + usize::from(expected % 50 == 0))
    );
    let by_key = "/console/topics/default/records?key=customer-7";
    let found = browser.get(by_key).await;
    found.expect(200, "1 match among 12,001 records up to the end").expect(200, "the last one");
    browser.get("/console/topics/default/records?key=customer").await.expect(200, "0 matches");
}

#[tokio::test]
async fn a_group_has_its_lag_of_the_last_minutes() {
    let (server, browser) = served().await;
    server.append(&["one", "two", "three"]).await;
    commit(&server).await;
    let answer = until("the lag is sampled", async || {
        let answer = browser.get("/console/groups/readers").await;
        answer.body.contains("<figure>").then_some(answer)
    })
    .await;
    answer.expect(200, "Lag, last 15 minutes <strong>2 records</strong>");
    answer.expect(200, "one value every 15 s");
}

#[tokio::test]
async fn slow_calls_of_all_nodes_are_on_one_page() {
    let mut trio = Trio::durable().await;
    for partition in 0..4 {
        trio.write(partition, &["x"]).await;
    }
    let leaders: std::collections::BTreeSet<u64> = trio.leaders().await.into_values().collect();
    for (_, node) in trio.nodes() {
        let page = Browser::of(node).get("/console/slow?kind=append").await;
        for leader in &leaders {
            page.expect(200, &format!("<td>{leader}, shard "));
        }
        for stage in ["queue", "settle", "default</a>/0"] {
            page.expect(200, stage);
        }
    }
    trio.stop(3).await;
    let page = Browser::of(trio.node(1)).get("/console/slow").await;
    page.expect(200, "Node 3 is not listed");
    trio.stop_all().await;
}

/// Reads events until one has this text.
async fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let mut read = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let count = soon(stream.read(&mut buffer)).await.unwrap();
        assert!(count > 0, "the tail ended: {}", String::from_utf8_lossy(&read));
        read.extend_from_slice(&buffer[..count]);
        let found = String::from_utf8_lossy(&read);
        if found.contains(text) {
            return found.into_owned();
        }
    }
}

#[tokio::test]
async fn a_live_tail_sends_new_records() {
    let (server, browser) = served().await;
    server.append(&["before"]).await;
    let open = async |headers: &str| {
        let mut stream = TcpStream::connect(browser.addr).await.unwrap();
        let request = format!(
            "GET /console/topics/default/events?from=1 HTTP/1.1\r\nHost: {}\r\n{headers}\r\n",
            browser.addr
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    };
    let mut tail = open("").await;
    let head = read_until(&mut tail, "\r\n\r\n").await.to_lowercase();
    assert!(head.contains("content-type: text/event-stream"), "{head}");
    server.append(&["first\n\ndata: forged", "second"]).await;
    let event = read_until(&mut tail, "second").await;
    assert!(event.contains("id: ") && event.contains("first\\n\\ndata: forged"), "{event}");
    assert!(!event.contains("before"), "{event}");
    server.append(&["third"]).await;
    read_until(&mut tail, "third").await;
    // A browser that connects again continues after its last event.
    let mut again = open("Last-Event-ID: 2\r\n").await;
    let event = read_until(&mut again, "third").await;
    assert!(!event.contains("second"), "{event}");
    // Their number is limited, and a closed one makes way.
    let mut others = Vec::new();
    for _ in 2..16 {
        let mut stream = open("").await;
        read_until(&mut stream, "third").await;
        others.push(stream);
    }
    let refused = browser.get("/console/topics/default/events?from=0").await;
    refused.expect(429, "too many live tails");
    drop((tail, again));
    until("a tail is free again", async || {
        let mut stream = open("").await;
        let head = read_until(&mut stream, "\r\n\r\n").await;
        head.contains(" 200 ").then_some(())
    })
    .await;
}

#[tokio::test]
async fn each_node_of_a_cluster_shows_groups_that_another_one_coordinates() {
    let mut trio = Trio::durable().await;
    let client: Client = trio.client();
    client.admin().commit_group_offsets("readers", &[commit_at(0, 0)]).await.unwrap();
    for (id, node) in trio.nodes() {
        let browser = Browser::of(node);
        // A node may not know of the group yet.
        until("the group is shown", async || {
            let answer = browser.get("/console/groups/readers").await;
            (answer.status == 200).then_some(answer)
        })
        .await
        .expect(200, "default</a>/0");
        until("all nodes give a report", async || {
            let answer = browser.get("/console/").await;
            (answer.status == 200 && answer.body.matches(">up</span>").count() == 3)
                .then_some(answer)
        })
        .await
        .expect(200, &format!("{id} <span class=\"dim\">(this one)</span>"));
    }
    trio.stop_all().await;
}
