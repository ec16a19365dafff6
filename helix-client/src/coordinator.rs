//! Calls to the coordinators of consumer groups: the leaders of the shards that hold the groups.
//!
//! The first call of a group goes to any node. NOT_LEADER names the coordinator.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};

use helix_proto::log::v1::{ErrorReason, LeaderHint};
use tonic::{Response, Status};

use crate::call_spec::CallSpec;
use crate::client::{CallAttempts, Client};
use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::routing::Routing;

/// Known coordinators, by the slots that group names hash to.
///
/// Groups of one slot have one coordinator, so that the number of groups does not matter. A wrong
/// entry costs a redirect.
#[derive(Debug, Default)]
pub(crate) struct Coordinators {
    addresses: Mutex<HashMap<u8, String>>,
}

impl Coordinators {
    fn get(&self, group: &str) -> Option<String> {
        self.addresses().get(&slot(group)).cloned()
    }

    fn learn(&self, group: &str, address: &str) {
        self.addresses().insert(slot(group), address.to_owned());
    }

    fn forget(&self, group: &str) {
        self.addresses().remove(&slot(group));
    }

    /// Returns the coordinator, else the node that most likely responds. Adds it to `tried`.
    fn next(&self, group: &str, routing: &Routing, tried: &mut Vec<String>) -> Result<Connection> {
        match self.get(group).and_then(|address| routing.node(&address).ok()) {
            Some(node) => {
                tried.push(node.address().to_owned());
                Ok(node)
            }
            None => routing.next_untried(tried),
        }
    }

    /// Learns from a failed call at `node`. Returns true if another coordinator is known.
    fn on_failure(&self, group: &str, routing: &Routing, node: &Connection, error: &Error) -> bool {
        let is_other = |hint: &&LeaderHint| {
            // A node that is reached over a Unix domain socket names itself by another address.
            let is_elsewhere = |hinted: Connection| hinted.address() != node.address();
            hint.node_id != 0
                && !hint.endpoint.is_empty()
                && routing.node(&hint.endpoint).is_ok_and(is_elsewhere)
        };
        match error.leader.as_ref().filter(is_other) {
            Some(hint) => self.learn(group, &hint.endpoint),
            // A final error is the verdict of the coordinator, but damage is that of a node.
            None if error.retryable || error.is(ErrorReason::CorruptLog) => self.forget(group),
            None => self.learn(group, node.address()),
        }
        error.leader.as_ref().is_some_and(|hint| is_other(&hint))
    }

    fn addresses(&self) -> MutexGuard<'_, HashMap<u8, String>> {
        // No code under the lock can panic in the middle of a change.
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the slot of a group: the last byte of the CRC-32 of its name.
fn slot(group: &str) -> u8 {
    crc32fast::hash(group.as_bytes()).to_le_bytes()[0]
}

impl Client {
    /// Calls a group's coordinator until it succeeds, fails permanently, or the deadline passes.
    ///
    /// If the call can be repeated safely, a silent node is abandoned after a timeout that doubles
    /// with each attempt.
    pub(crate) async fn call_coordinator<T, F, Fut>(
        &self,
        group: &str,
        call: CallSpec,
        attempt: F,
    ) -> Result<T>
    where
        F: Fn(Connection) -> Fut,
        Fut: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        let (routing, coordinators) = (&self.shared.routing, &self.shared.coordinators);
        let mut attempts = CallAttempts::new(&self.shared, call);
        let mut attempt_timeout = attempts.first_timeout();
        let mut tried = Vec::new();
        attempts.ensure_contact().await;
        loop {
            let node = coordinators.next(group, routing, &mut tried)?;
            let limit = attempts.limit_at(&node, attempt_timeout);
            let error = match attempts.attempt_within(limit, attempt(node.clone())).await {
                Ok(response) => {
                    routing.on_response(&node);
                    coordinators.learn(group, node.address());
                    return Ok(response);
                }
                Err(error) => error,
            };
            routing.on_silence(&node, &error);
            let is_redirected = coordinators.on_failure(group, routing, &node, &error);
            attempt_timeout = attempt_timeout.saturating_mul(2);
            let error = attempts.judge_with(error, None, is_redirected)?;
            attempts.pause(error).await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use helix_proto::error as wire;
    use helix_proto::log::v1::{ErrorDetail, GetMetadataResponse, Metadata, Node};

    use super::*;
    use crate::config::Config;

    fn failed(reason: ErrorReason, leader: Option<LeaderHint>) -> Error {
        let detail = ErrorDetail { leader, ..wire::detail(reason) };
        Error::from_status(&wire::to_status(&detail, "", None))
    }

    #[tokio::test]
    async fn follows_hints_and_keeps_the_coordinator_of_a_final_error() {
        let routing = Routing::new(Config::new(["n1:1"])).unwrap();
        let node = routing.node("n1:1").unwrap();
        let known = Coordinators::default();
        let hint = |endpoint: &str| {
            Some(LeaderHint { node_id: 2, endpoint: endpoint.to_owned(), term: 1 })
        };
        assert!(known.on_failure(
            "g",
            &routing,
            &node,
            &failed(ErrorReason::NotLeader, hint("n2:1"))
        ));
        assert_eq!(known.get("g").as_deref(), Some("n2:1"));
        // A node that names itself, or no node, is not the coordinator.
        for itself in [hint("n1:1"), hint(""), None] {
            assert!(!known.on_failure(
                "g",
                &routing,
                &node,
                &failed(ErrorReason::NotLeader, itself)
            ));
            assert_eq!(known.get("g"), None);
        }
        assert!(!known.on_failure("g", &routing, &node, &failed(ErrorReason::GroupNotEmpty, None)));
        assert_eq!(known.get("g").as_deref(), Some("n1:1"));
        assert!(!known.on_failure("g", &routing, &node, &Error::timed_out("describe group")));
        assert_eq!(known.get("g"), None);
    }

    #[tokio::test]
    async fn damage_on_a_node_sends_the_next_attempt_to_another_one() {
        let routing = Routing::new(Config::new(["n1:1", "n2:1"])).unwrap();
        let (known, mut tried) = (Coordinators::default(), Vec::new());
        known.learn("g", "n1:1");
        let node = known.next("g", &routing, &mut tried).unwrap();
        let damaged = failed(ErrorReason::CorruptLog, None);
        assert!(!known.on_failure("g", &routing, &node, &damaged));
        assert_eq!(known.get("g"), None, "the verdict of one node");
        assert_eq!(known.next("g", &routing, &mut tried).unwrap().address(), "n2:1");
    }

    #[tokio::test]
    async fn a_node_behind_a_socket_that_names_itself_is_not_another_one() {
        let routing = Routing::new(Config::new(["unix:/run/helix.sock"])).unwrap();
        let socket = routing.node("unix:/run/helix.sock").unwrap();
        let known = Coordinators::default();
        let hint = LeaderHint { node_id: 2, endpoint: "n2:1".to_owned(), term: 1 };
        let error = failed(ErrorReason::NotLeader, Some(hint.clone()));
        assert!(known.on_failure("g", &routing, &socket, &error), "its node is not known yet");
        let node = Node { node_id: 2, endpoint: hint.endpoint, ..Node::default() };
        let metadata = Some(Metadata { nodes: vec![node], ..Metadata::default() });
        routing.on_reported(&socket, &GetMetadataResponse { metadata, node_id: 2 });
        assert!(!known.on_failure("g", &routing, &socket, &error));
        assert_eq!(known.get("g"), None);
    }

    #[test]
    fn slots_are_those_of_the_server() {
        assert_eq!(slot("readers"), (crc32fast::hash(b"readers") % 256) as u8);
    }
}
