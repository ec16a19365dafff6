//! Access control on three nodes: changes reach every node, and outlive a leader.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use helix_client::{AccessGrant, Admin, Client, Config, TokenSource};
use helix_proto::log::v1::access_service_client::AccessServiceClient;
use helix_proto::log::v1::topic_service_client::TopicServiceClient;
use helix_proto::log::v1::{
    AccessOperation, AccessRole, CreateTopicRequest, ErrorReason, RemoveAccessRequest,
    ResourceKind, WhoAmIRequest,
};
use helix_server::config::{AuthSetting, ServerConfig};
use helix_server::limits::{ELECTION_TIMEOUT_MS_MAX, READY_WAIT_MAX};
use tokio::time::Instant;

use super::{expect_within_a_second, role, rule, rules, with_token};
use crate::support::{TestServer, reason};
use crate::trio::{NODES, Trio, TrioPlan, launch, until};

struct GuardedTrio {
    plan: TrioPlan,
    nodes: BTreeMap<u64, TestServer>,
}

impl GuardedTrio {
    async fn start(auth: AuthSetting) -> Self {
        Self::start_as(TrioPlan::new(), |config| ServerConfig { auth, ..config }).await
    }

    async fn start_as(plan: TrioPlan, change: impl Fn(ServerConfig) -> ServerConfig) -> Self {
        let launched = NODES.map(|node| (node, launch(change(plan.config(node)))));
        let mut nodes = BTreeMap::new();
        for (node, server) in launched {
            nodes.insert(node, server.await.unwrap());
        }
        Self { plan, nodes }
    }

    fn files(&self) -> Vec<PathBuf> {
        NODES.map(|node| self.plan.data_dir(node).join("admin-token")).into()
    }

    /// Waits for the first token, which one node writes.
    async fn first_token(&self) -> String {
        until("every node accepts the first token", async || {
            let found = self.files().into_iter().find_map(|path| {
                #[allow(clippy::disallowed_methods)]
                let token = std::fs::read_to_string(path).ok()?;
                Some(token.trim().to_owned())
            });
            let token = found?;
            for node in self.nodes.values() {
                who_am_i(node, &token).await.ok()?;
            }
            Some(token)
        })
        .await
    }

    fn client(&self, token: &str) -> Client {
        let addresses = self.nodes.values().map(|node| node.running.local_addr().to_string());
        let token = TokenSource::fixed(token).unwrap();
        Client::new(Config { token, seed: Some(1), ..Config::new(addresses) }).unwrap()
    }
}

async fn who_am_i(node: &TestServer, token: &str) -> Result<String, tonic::Status> {
    let mut access = AccessServiceClient::new(with_token(&node.channel, token));
    Ok(access.who_am_i(WhoAmIRequest {}).await?.into_inner().principal)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revocation_reaches_every_node_within_a_second() {
    let trio = GuardedTrio::start(AuthSetting::Required).await;
    let admin_token = trio.first_token().await;
    // A node whose token was not the first one removes its file.
    until("one node has the first token", async || {
        let written = trio.files().into_iter().filter(|path| path.exists()).count();
        (written == 1).then_some(())
    })
    .await;
    let admin = trio.client(&admin_token).admin();
    let grant = role(AccessRole::Consumer, "default");
    for _ in 0..3 {
        expect_within_a_second(async || {
            let token = admin.create_token("reader", None, &grant).await.unwrap().token;
            for node in trio.nodes.values() {
                until("the node knows the token", async || {
                    Some(who_am_i(node, &token).await.ok()? == "reader")
                })
                .await;
            }
            admin.revoke_tokens("reader").await.unwrap();
            let revoked = Instant::now();
            for node in trio.nodes.values() {
                until("the node refuses the token", async || {
                    let refused = who_am_i(node, &token).await.err()?;
                    assert_eq!(reason(&refused), ErrorReason::Unauthenticated);
                    Some(())
                })
                .await;
            }
            revoked.elapsed()
        })
        .await;
    }
}

async fn shard_0_leader(admin: &Admin) -> u64 {
    until("shard 0 has a leader", async || {
        let metadata = admin.metadata(&[]).await.ok()?;
        let own = metadata.shards.into_iter().find(|shard| shard.shard_id == 0)?;
        Some(own.leader?.node_id).filter(|node| *node > 0)
    })
    .await
}

/// Asks a node whether a topic could be created, which is a control call.
async fn create(node: &TestServer, token: &str) -> Result<(), tonic::Status> {
    let mut topics = TopicServiceClient::new(with_token(&node.channel, token));
    let request = CreateTopicRequest {
        name: "made-1".to_owned(),
        partition_count: 1,
        validate_only: true,
        ..CreateTopicRequest::default()
    };
    topics.create_topic(request).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_right_changes_nothing_through_a_node_that_lags() {
    // A node that hears nothing forwards calls to its leader until the election timeout.
    let plan = TrioPlan::linked().await;
    let guarded = GuardedTrio::start_as(plan, |config| ServerConfig {
        auth: AuthSetting::Required,
        election_timeout_ms: ELECTION_TIMEOUT_MS_MAX,
        ..config
    });
    let guarded = guarded.await;
    let admin_token = guarded.first_token().await;
    let admin = guarded.client(&admin_token).admin();
    let made = admin.create_token("maker", None, &AccessGrant::default()).await.unwrap();
    let grant = rules(&[rule(ResourceKind::Topic, "made-*", &[AccessOperation::Create])]);
    admin.allow_access("maker", &grant).await.unwrap();
    for node in guarded.nodes.values() {
        until("the node allows it", async || create(node, &made.token).await.ok()).await;
    }
    let leader = shard_0_leader(&admin).await;
    let trio = Trio::of(guarded.plan, guarded.nodes);
    let lagging = NODES.into_iter().find(|node| *node != leader).unwrap();
    let hold_back = |is_cut| {
        for from in NODES.into_iter().filter(|from| *from != lagging) {
            trio.set_link(from, lagging, Duration::ZERO, is_cut);
        }
    };
    // The node still reaches the others.
    hold_back(true);
    let request = RemoveAccessRequest {
        principal: "maker".to_owned(),
        rules: grant.rules,
        roles: grant.roles,
    };
    let channel = with_token(&trio.node(leader).channel, &admin_token);
    AccessServiceClient::new(channel).remove_access(request).await.unwrap();

    let node = trio.node(lagging);
    let mut access = AccessServiceClient::new(with_token(&node.channel, &made.token));
    let known = access.who_am_i(WhoAmIRequest {}).await.unwrap().into_inner();
    assert_eq!(known.rules.len(), 1, "the node has not applied the removal");
    let refused = create(node, &made.token).await.expect_err("the right was removed");
    assert_eq!(reason(&refused), ErrorReason::NoLeader, "it cannot learn the rules");
    hold_back(false);
    until("the node has applied the removal", async || {
        let refused = create(node, &made.token).await.expect_err("the right was removed");
        (reason(&refused) == ErrorReason::PermissionDenied).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_calls_without_a_leader_fail_together() {
    let mut trio = GuardedTrio::start(AuthSetting::Required).await;
    let token = trio.first_token().await;
    for node in [2, 3] {
        let TestServer { running, channel, .. } = trio.nodes.remove(&node).unwrap();
        drop(channel);
        running.shutdown().await;
    }
    let began = Instant::now();
    let calls = (0..8).map(|_| create(&trio.nodes[&1], &token));
    for result in futures_util::future::join_all(calls).await {
        assert_eq!(reason(&result.unwrap_err()), ErrorReason::NoLeader);
    }
    // One after another, they would wait for a leader eight times.
    assert!(began.elapsed() < 6 * READY_WAIT_MAX, "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_and_rules_outlive_the_leader_and_a_restart() {
    let mut trio = GuardedTrio::start(AuthSetting::Required).await;
    let admin_token = trio.first_token().await;
    let admin = trio.client(&admin_token).admin();
    let token = admin.create_token("worker", None, &role(AccessRole::Producer, "default")).await;
    let token = token.unwrap().token;
    let leader = shard_0_leader(&admin).await;
    let TestServer { running, channel, .. } = trio.nodes.remove(&leader).unwrap();
    drop(channel);
    running.shutdown().await;
    let none = AccessGrant::default();
    admin.create_token("later", None, &none).await.unwrap();
    let config = ServerConfig { auth: AuthSetting::Required, ..trio.plan.config(leader) };
    trio.nodes.insert(leader, launch(config).await.unwrap());
    for node in trio.nodes.values() {
        until("the node knows the tokens", async || {
            Some(who_am_i(node, &token).await.ok()? == "worker")
        })
        .await;
    }
    assert_eq!(admin.tokens(None).await.unwrap().len(), 3);
    // A node that was just started may not list the topic yet, and then it is not found.
    until("the deletion is denied", async || {
        let denied = trio.client(&token).admin().delete_topic("default").await.unwrap_err();
        (denied.reason == Some(ErrorReason::PermissionDenied)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_cluster_begins_to_check_its_callers_node_by_node() {
    let mut trio = GuardedTrio::start(AuthSetting::Off).await;
    // While it is open, an operator makes the tokens that clients will need.
    let open = Client::new(Config::new(
        trio.nodes.values().map(|node| node.running.local_addr().to_string()),
    ));
    let open = open.unwrap().admin();
    let created = open.create_token("ops", None, &role(AccessRole::Admin, "")).await.unwrap();
    let client = trio.client(&created.token);
    client.admin().topics("").await.unwrap();
    for auth in [AuthSetting::Optional, AuthSetting::Required] {
        for node in NODES {
            let TestServer { running, channel, .. } = trio.nodes.remove(&node).unwrap();
            drop(channel);
            running.shutdown().await;
            let config = ServerConfig { auth, ..trio.plan.config(node) };
            trio.nodes.insert(node, launch(config).await.unwrap());
            client.admin().topics("").await.unwrap();
        }
        let anonymous = open.topics("").await;
        assert_eq!(anonymous.is_ok(), auth == AuthSetting::Optional, "{anonymous:?}");
    }
    assert!(trio.files().iter().all(|path| !path.exists()), "the cluster had a token before");
}
