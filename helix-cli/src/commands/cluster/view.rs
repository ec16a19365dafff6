//! What the nodes of a cluster say, each for itself. Those that do not answer are part of it.
//! A view has at least one node that answers.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use helix_client::proto::log::v1::{
    GetHealthResponse, GetNodeStatusResponse, LeaderHint, Metadata, Node, ShardStatus,
};
use helix_client::{Admin, Client, Config, Error};

use crate::args::Global;

/// How long a node may take to answer. One that takes longer is as good as down.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// A cluster as its nodes see it.
#[derive(Debug)]
pub(crate) struct View {
    /// By node id.
    pub(crate) nodes: Vec<Asked>,
    /// Addresses that the user gave, at which nobody answers and where no known node is.
    pub(crate) silent: Vec<(String, Error)>,
}

/// A node that was asked.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) node_id: u64,
    pub(crate) endpoint: String,
    pub(crate) answer: Result<Answer, Error>,
}

/// What a node says.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) metadata: Metadata,
    pub(crate) status: GetNodeStatusResponse,
    pub(crate) health: GetHealthResponse,
}

impl View {
    /// Asks the nodes at the given addresses who there is, and then everyone.
    ///
    /// # Errors
    /// No node answers.
    pub(crate) async fn ask(global: &Global) -> anyhow::Result<Self> {
        let config = Config {
            connect_timeout: ANSWER_MAX,
            attempt_timeout: ANSWER_MAX,
            ..Config::new(global.addr.iter().cloned())
        };
        let admin = Client::new(config)?.admin();
        let found = join_all(global.addr.iter().map(|addr| admin.node_metadata(addr))).await;
        let (answers, mut silent) = split(&global.addr, found);
        if answers.is_empty()
            && let Some((_, error)) = silent.pop()
        {
            return Err(error).with_context(|| format!("ask {}", global.addr.join(",")));
        }
        let known = known(answers);
        silent.retain(|(addr, _)| !known.values().any(|endpoint| endpoint == addr));
        let nodes = join_all(known.into_iter().map(|(id, at)| asked(&admin, id, at))).await;
        Ok(Self { nodes, silent })
    }

    /// Nodes that have answered, with what they say.
    pub(crate) fn answers(&self) -> impl Iterator<Item = (u64, &Answer)> {
        self.nodes.iter().filter_map(|node| Some((node.node_id, node.answer.as_ref().ok()?)))
    }

    /// The newest metadata.
    pub(crate) fn metadata(&self) -> Option<&Metadata> {
        let all = self.answers().map(|(_, answer)| &answer.metadata);
        all.max_by_key(|metadata| metadata.version)
    }

    /// Leader of each shard that anyone knows of: whoever has heard of the highest term is right.
    /// None: nobody knows one.
    pub(crate) fn leaders(&self) -> BTreeMap<u32, Option<LeaderHint>> {
        let mut leaders: BTreeMap<u32, Option<LeaderHint>> = BTreeMap::new();
        let routes = self.answers().flat_map(|(_, answer)| &answer.metadata.shards);
        let routes = routes.map(|shard| (shard.shard_id, shard.leader.as_ref()));
        let statuses = self.answers().flat_map(|(_, answer)| &answer.status.shards);
        let statuses = statuses.map(|shard| (shard.shard_id, shard.leader.as_ref()));
        for (shard_id, hint) in routes.chain(statuses) {
            let known = leaders.entry(shard_id).or_default();
            let hint = hint.filter(|hint| hint.node_id != 0);
            if hint.map(|hint| hint.term) > known.as_ref().map(|known| known.term) {
                *known = hint.cloned();
            }
        }
        leaders
    }

    pub(crate) fn leader(&self, shard_id: u32) -> Option<LeaderHint> {
        self.leaders().remove(&shard_id).flatten()
    }

    pub(crate) fn is_reachable(&self, node_id: u64) -> bool {
        self.answers().any(|(id, _)| id == node_id)
    }

    /// A node's replica of a shard, if the node answers and has one.
    pub(crate) fn replica(&self, shard_id: u32, node_id: u64) -> Option<&ShardStatus> {
        let (_, answer) = self.answers().find(|(id, _)| *id == node_id)?;
        answer.status.shards.iter().find(|shard| shard.shard_id == shard_id)
    }
}

/// Those that answered, and the addresses of those that did not.
fn split(
    addresses: &[String],
    found: Vec<Result<Metadata, Error>>,
) -> (Vec<Metadata>, Vec<(String, Error)>) {
    let mut answers = Vec::new();
    let mut silent = Vec::new();
    for (address, answer) in addresses.iter().zip(found) {
        match answer {
            Ok(metadata) => answers.push(metadata),
            Err(error) => silent.push((address.clone(), error)),
        }
    }
    (answers, silent)
}

/// The nodes that anyone knows of, with their addresses: those of the newest answer, if several
/// differ.
fn known(mut answers: Vec<Metadata>) -> BTreeMap<u64, String> {
    answers.sort_by_key(|metadata| metadata.version);
    let nodes = answers.into_iter().flat_map(|metadata| metadata.nodes);
    nodes.map(|Node { node_id, endpoint, .. }| (node_id, endpoint)).collect()
}

async fn asked(admin: &Admin, node_id: u64, endpoint: String) -> Asked {
    let answers = tokio::join!(
        admin.node_metadata(&endpoint),
        admin.node_status(Some(&endpoint)),
        admin.node_health(&endpoint),
    );
    let answer = match answers {
        (Ok(metadata), Ok(status), Ok(health)) => Ok(Answer { metadata, status, health }),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => Err(error),
    };
    Asked { node_id, endpoint, answer }
}

#[cfg(test)]
pub(crate) mod tests {
    use helix_client::proto::log::v1::{ShardRoute, TopicRoute};
    use tonic::Status;

    use super::*;

    pub(crate) fn hint(node_id: u64, term: u64) -> Option<LeaderHint> {
        Some(LeaderHint { node_id, endpoint: format!("n{node_id}"), term })
    }

    fn metadata(version: u64, leader: Option<LeaderHint>) -> Metadata {
        Metadata {
            cluster_id: "c".to_owned(),
            version,
            nodes: (1..=3)
                .map(|id| Node { node_id: id, endpoint: format!("n{id}"), ..Node::default() })
                .collect(),
            shards: vec![
                ShardRoute {
                    shard_id: 0,
                    leader: hint(1, 3),
                    replicas: vec![1, 2, 3],
                    ..ShardRoute::default()
                },
                ShardRoute {
                    shard_id: 1,
                    leader,
                    replicas: vec![1, 2, 3],
                    ..ShardRoute::default()
                },
            ],
            topics: vec![TopicRoute { topic: "orders".to_owned(), shard_ids: vec![1, 1, 1] }],
        }
    }

    fn shard(shard_id: u32, term: u64, last_index: u64, synced_index: u64) -> ShardStatus {
        let (committed_index, applied_index) = (synced_index, synced_index);
        ShardStatus {
            shard_id,
            term,
            last_index,
            synced_index,
            committed_index,
            applied_index,
            ..ShardStatus::default()
        }
    }

    /// Three nodes: 2 leads shard 1 as 2 and 1 know by now, 3 does not answer.
    pub(crate) fn view() -> View {
        let answer = |version, leader, shards| Answer {
            metadata: metadata(version, leader),
            status: GetNodeStatusResponse { shards, ..GetNodeStatusResponse::default() },
            health: GetHealthResponse { healthy: true, issues: Vec::new() },
        };
        let one = answer(7, hint(2, 6), vec![shard(0, 3, 9, 9), shard(1, 6, 90, 80)]);
        let two = answer(8, hint(2, 6), vec![shard(0, 3, 9, 9), shard(1, 6, 100, 100)]);
        let down = Error::from_status(&Status::unavailable("connection refused"));
        let asked = |node_id, answer| Asked { node_id, endpoint: format!("n{node_id}"), answer };
        let nodes = vec![asked(1, Ok(one)), asked(2, Ok(two)), asked(3, Err(down))];
        View { nodes, silent: Vec::new() }
    }

    #[test]
    fn the_highest_term_names_the_leader() {
        let mut view = view();
        let leader = |view: &View| view.leaders()[&1].as_ref().map(|leader| leader.node_id);
        assert_eq!(leader(&view), Some(2));
        let Ok(one) = &mut view.nodes[0].answer else { panic!("it answers") };
        one.metadata.shards[1].leader = hint(1, 5);
        assert_eq!(leader(&view), Some(2));
        let Ok(one) = &mut view.nodes[0].answer else { panic!("it answers") };
        one.metadata.shards[1].leader = hint(3, 9);
        assert_eq!(leader(&view), Some(3));
    }

    #[test]
    fn a_shard_that_nobody_leads_is_there_without_a_leader() {
        let mut view = view();
        for node in &mut view.nodes {
            if let Ok(answer) = &mut node.answer {
                answer.metadata.shards[1].leader = None;
            }
        }
        assert_eq!(view.leaders()[&1], None);
        assert_eq!(view.metadata().unwrap().version, 8);
    }

    #[test]
    fn one_answer_is_enough_to_know_the_nodes() {
        let down = Err(Error::from_status(&Status::unavailable("refused")));
        let addresses = ["n9".to_owned(), "n1".to_owned()];
        let (answers, silent) = split(&addresses, vec![down, Ok(metadata(1, None))]);
        assert_eq!(silent[0].0, "n9");
        assert_eq!(known(answers).into_keys().collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn the_newest_answer_has_the_address() {
        let mut old = metadata(1, None);
        old.nodes[0].endpoint = "before".to_owned();
        assert_eq!(known(vec![metadata(2, None), old])[&1], "n1");
    }
}
