//! Measures the checks of one call, with the login that its connection keeps and with a new one.

use std::path::Path;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use helix_client::{AccessGrant, Admin, Client, Config, TokenSource};
use helix_proto::log::v1::{AccessOperation as Operation, AccessRule, ResourceKind};
use helix_server::config::{AuthSetting, ServerConfig};
use helix_server::log::{AccessOperation, AccessResource, RULES_PER_PRINCIPAL_MAX};
use helix_server::server::{RunningServer, Server};
use tokio::runtime::Runtime;

/// Sorts after all others, so that a check compares every rule.
const TOPIC: &str = "z";

/// Rules in one call, below the limit.
const RULES_PER_CALL: usize = 64;

async fn start(directory: &Path) -> (RunningServer, Admin) {
    let token_file = directory.join("token");
    let config = ServerConfig {
        auth: AuthSetting::Required,
        admin_token_file: Some(token_file.clone()),
        ..ServerConfig::in_memory()
    };
    let running = Server::start(config).await.expect("it starts");
    loop {
        if let Ok(token) = TokenSource::file(&token_file) {
            let config = Config::new([running.local_addr().to_string()]);
            let client = Client::new(Config { token, ..config }).expect("a valid configuration");
            if client.admin().who_am_i().await.is_ok() {
                return (running, client.admin());
            }
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Makes a token of a principal with this many rules, and returns its header.
async fn header(admin: &Admin, rules: usize) -> Vec<u8> {
    let principal = format!("with-{rules}");
    let names = (1..rules).map(|number| format!("t-{number:03}")).chain([TOPIC.to_owned()]);
    let rule = |name: String| AccessRule {
        resource_kind: ResourceKind::Topic.into(),
        name,
        operations: vec![Operation::Write.into()],
        ..AccessRule::default()
    };
    let all: Vec<AccessRule> = names.map(rule).collect();
    for some in all.chunks(RULES_PER_CALL) {
        let grant = AccessGrant { rules: some.to_vec(), ..AccessGrant::default() };
        admin.allow_access(&principal, &grant).await.expect("rules are added");
    }
    let made = admin.create_token(&principal, None, &AccessGrant::default()).await;
    format!("Bearer {}", made.expect("a token is made").token).into_bytes()
}

fn checks(criterion: &mut Criterion) {
    let runtime = Runtime::new().expect("a runtime");
    let directory = tempfile::tempdir().expect("a directory");
    let (running, admin) = runtime.block_on(start(directory.path()));
    let node = running.node().clone();
    let mut group = criterion.benchmark_group("access");
    for rules in [1, RULES_PER_PRINCIPAL_MAX] {
        let header = runtime.block_on(header(&admin, rules));
        let login = || {
            let login = node.login(Some(&header), None).expect("the token is valid");
            login.expect("it names a caller")
        };
        group.bench_function(BenchmarkId::new("login", rules), |bencher| bencher.iter(login));
        let caller = login();
        let topic = AccessResource::Topic(TOPIC);
        assert!(caller.may(AccessOperation::Write, topic));
        // As for an append: the gate asks first, and then the handler.
        group.bench_function(BenchmarkId::new("check", rules), |bencher| {
            bencher.iter(|| {
                node.is_current(&caller)
                    && node.is_current(&caller)
                    && caller.may(AccessOperation::Write, topic)
            });
        });
    }
    group.finish();
    drop((admin, node));
    runtime.block_on(running.shutdown());
}

criterion_group!(benches, checks);
criterion_main!(benches);
