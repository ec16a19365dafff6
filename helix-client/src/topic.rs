//! Topics by name and id, and calls that name the id of their topic.
//!
//! All attempts of a call name the same id, so that an attempt without a response never acts on a
//! topic that was deleted and created again since.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};

use tonic::{Response, Status};

use crate::call_spec::CallSpec;
use crate::client::Client;
use crate::connection::Connection;
use crate::error::{Error, Result};

/// Times that a call turns to a newer topic of the name before it gives up.
const FOLLOWS_MAX: u32 = 3;

/// A topic by name, and optionally the id that it must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopicRef<'a> {
    /// Name.
    pub name: &'a str,
    /// Id that the topic must have, else the call fails with `TOPIC_RECREATED`. 0: any.
    pub id: u64,
}

impl<'a> TopicRef<'a> {
    /// Returns the topic with this name and id.
    pub fn with_id(name: &'a str, id: u64) -> Self {
        Self { name, id }
    }
}

impl<'a> From<&'a str> for TopicRef<'a> {
    fn from(name: &'a str) -> Self {
        Self { name, id: 0 }
    }
}

impl<'a> From<&'a String> for TopicRef<'a> {
    fn from(name: &'a String) -> Self {
        Self { name, id: 0 }
    }
}

/// The id that the attempts of a call name.
struct TopicPin {
    /// 0 until it is known.
    id: AtomicU64,
    /// True if the caller knows nothing of the topic but its name.
    is_free: bool,
    follows: u32,
}

impl TopicPin {
    fn new(id: u64) -> Self {
        Self { id: AtomicU64::new(id), is_free: id == 0, follows: 0 }
    }

    /// Returns the id to name, which is `current` from then on if none is known yet.
    fn get_or_set(&self, current: u64) -> u64 {
        match self.id.compare_exchange(0, current, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => current,
            Err(known) => known,
        }
    }

    /// Turns to the topic that has the name now. Returns false if the error is final: the caller
    /// or an attempt without a response stands for the old topic.
    fn follow(&mut self, error: &Error) -> bool {
        let Some(recreated) = &error.recreated else { return false };
        if !self.is_free || error.may_have_applied || self.follows >= FOLLOWS_MAX {
            return false;
        }
        self.follows += 1;
        self.id = AtomicU64::new(recreated.id);
        true
    }
}

impl Client {
    /// Like [`Client::call_leader`]. `attempt` also gets the id of the topic to name.
    pub(crate) async fn call_leader_of<T, F, Fut>(
        &self,
        topic: TopicRef<'_>,
        partition: u32,
        call: CallSpec,
        attempt: F,
    ) -> Result<T>
    where
        F: Fn(Connection, u64) -> Fut,
        Fut: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        let mut pin = TopicPin::new(topic.id);
        loop {
            let calling = self.call_leader((topic.name, partition), call, |route| {
                attempt(route.connection.clone(), pin.get_or_set(route.topic_id))
            });
            match calling.await {
                Err(error) if pin.follow(&error) => {}
                result => return result,
            }
        }
    }

    /// Like [`Client::call_any`], for a change of a topic. `attempt` also gets the id to name.
    pub(crate) async fn change_topic<T, F, Fut>(
        &self,
        topic: TopicRef<'_>,
        call: CallSpec,
        attempt: F,
    ) -> Result<T>
    where
        F: Fn(Connection, u64) -> Fut,
        Fut: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        let mut pin = TopicPin::new(topic.id);
        if pin.is_free {
            pin.get_or_set(self.admin().topic(topic.name).await?.topic_id);
        }
        loop {
            let calling = self.call_any(call, |node| attempt(node, pin.get_or_set(0)));
            match calling.await {
                Err(error) if pin.follow(&error) => {}
                result => return result,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_attempts_name_the_first_id() {
        let pin = TopicPin::new(0);
        assert_eq!([pin.get_or_set(3), pin.get_or_set(5)], [3, 3]);
        assert_eq!(TopicPin::new(7).get_or_set(3), 7);
    }

    #[test]
    fn follows_a_new_topic_only_without_knowledge_of_the_old_one() {
        let recreated = || Error::recreated("orders", 3, 5);
        let mut pin = TopicPin::new(0);
        pin.get_or_set(3);
        assert!(!pin.follow(&recreated().with_may_have_applied(true)));
        assert!(pin.follow(&recreated()));
        assert_eq!(pin.get_or_set(9), 5);
        assert!(!TopicPin::new(3).follow(&recreated()));
        let missing = Error::known(helix_proto::log::v1::ErrorReason::TopicNotFound, "");
        assert!(!pin.follow(&missing));
    }
}
