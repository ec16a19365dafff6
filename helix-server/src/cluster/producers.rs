//! Producer identities of the cluster: ids, epochs of names, and the owner of each.

use std::sync::Arc;

use super::state::{ClusterState, CommandResult, checked_ids, invalid};
use crate::limits::PRODUCER_NAME_BYTES_MAX;
use crate::log::{ClusterReply, ProducerOwner, ProducerStamp, Refusal};

/// A name and its current identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedProducer {
    pub(super) producer_id: u64,
    pub(super) epochs: IssuedEpochs,
    /// Index of the last entry that used it.
    pub(super) last_used: u64,
}

/// Epochs of a named producer's id: `0..=newest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IssuedEpochs {
    pub(super) newest: u32,
    /// Owner of the newest epoch.
    pub(super) owner: ProducerOwner,
    /// First epoch from which all belong to `owner`. Owners of earlier ones are not remembered.
    pub(super) owned_since: u32,
}

impl IssuedEpochs {
    fn check(&self, stamp: &ProducerStamp) -> Result<(), Refusal> {
        let ProducerStamp { producer_id, epoch, .. } = *stamp;
        if epoch > self.newest {
            return Err(Refusal::UnknownProducer { producer_id });
        }
        if epoch < self.owned_since {
            let current_epoch = self.newest;
            return Err(Refusal::ProducerFenced { producer_id, epoch, current_epoch });
        }
        stamp.check_owner(self.owner)
    }
}

impl ClusterState {
    /// Returns the next producer id; all lower ids are issued.
    pub fn next_producer_id(&self) -> u64 {
        self.next_producer_id
    }

    /// Checks that this id and epoch were issued to the owner of the stamp.
    ///
    /// An id without a name may be used with any epoch by its owner: Kafka's clients count the
    /// epoch up on their side after a gap in their sequence (KIP-360). Such an epoch fences only
    /// earlier batches of the same owner. A name's id has the epochs that were issued. Ids whose
    /// owner is no longer remembered count as not issued.
    ///
    /// # Errors
    /// [`Refusal::UnknownProducer`] if it was not issued, or before there were owners;
    /// [`Refusal::ProducerFenced`] if another principal owns the name since;
    /// [`Refusal::ProducerNotOwned`].
    pub fn check_identity(&self, stamp: &ProducerStamp) -> Result<(), Refusal> {
        let unknown = Refusal::UnknownProducer { producer_id: stamp.producer_id };
        if stamp.producer_id >= self.next_producer_id {
            return Err(unknown);
        }
        match self.epochs.get(&stamp.producer_id) {
            Some(epochs) => epochs.check(stamp),
            None => {
                let owner = self.owner_of(stamp.producer_id).ok_or_else(|| unknown.clone())?;
                match stamp.check_owner(owner) {
                    // The id may be of a name that is no longer remembered, and of another owner.
                    Err(_) if stamp.epoch > 0 => Err(unknown),
                    checked => checked,
                }
            }
        }
    }

    pub(super) fn lease_producer_ids(&mut self, count: u32, owner: ProducerOwner) -> CommandResult {
        if count == 0 {
            return Err(invalid("count", "must be at least 1"));
        }
        let first = self.next_producer_id;
        self.next_producer_id = checked_ids(first, count)?;
        self.set_owner(first, owner);
        Ok(ClusterReply::ProducerIds { first, count })
    }

    pub(super) fn init_producer(
        &mut self,
        index: u64,
        name: &str,
        owner: ProducerOwner,
    ) -> CommandResult {
        if name.is_empty() || name.len() > PRODUCER_NAME_BYTES_MAX {
            let what = format!("a producer name has 1..={PRODUCER_NAME_BYTES_MAX} bytes");
            return Err(invalid("producer_name", what));
        }
        let (name, known) = match self.named.get_key_value(name) {
            Some((name, producer)) => (name.clone(), Some(producer)),
            None => (Arc::from(name), None),
        };
        // An id whose epochs are used up is replaced. The new id does not fence earlier sessions.
        let next = known.and_then(|it| Some((it, it.epochs.newest.checked_add(1)?)));
        let next = next.map(|(it, newest)| {
            let IssuedEpochs { owner: earlier, owned_since, .. } = it.epochs;
            let owned_since = if earlier == owner { owned_since } else { newest };
            (it.producer_id, IssuedEpochs { newest, owner, owned_since })
        });
        let used_before = known.map(|it| (it.last_used, it.producer_id));
        let (producer_id, epochs) = match next {
            Some(next) => next,
            None => {
                let producer_id = self.next_producer_id;
                self.next_producer_id = checked_ids(producer_id, 1)?;
                self.set_owner(producer_id, owner);
                (producer_id, IssuedEpochs { newest: 0, owner, owned_since: 0 })
            }
        };
        if let Some((last_used, old_id)) = used_before {
            self.names_by_use.remove(&last_used);
            self.epochs.remove(&old_id);
        }
        self.names_by_use.insert(index, name.clone());
        self.epochs.insert(producer_id, epochs);
        self.named.insert(name, NamedProducer { producer_id, epochs, last_used: index });
        while self.named.len() > self.producers_max() {
            let Some((_, oldest)) = self.names_by_use.pop_first() else { break };
            if let Some(producer) = self.named.remove(&oldest) {
                self.epochs.remove(&producer.producer_id);
            }
        }
        Ok(ClusterReply::Producer { producer_id, epoch: epochs.newest })
    }

    /// Limit of the names, and of the runs of ids with one owner, that are remembered.
    fn producers_max(&self) -> usize {
        self.limits.named_producers_max.max(1) as usize
    }

    /// Sets the owner of all ids from `first` on; no id above it has one yet.
    fn set_owner(&mut self, first: u64, owner: ProducerOwner) {
        let newest = self.id_owners.last_key_value();
        if newest.map_or(ProducerOwner::ANONYMOUS, |(_, newest)| *newest) == owner {
            return;
        }
        if self.id_owners.is_empty() && first > 1 {
            self.id_owners.insert(1, ProducerOwner::ANONYMOUS);
        }
        self.id_owners.insert(first, owner);
        while self.id_owners.len() > self.producers_max() {
            self.id_owners.pop_first();
        }
    }

    /// Returns the owner that an issued id was first given to; `None` if it was forgotten.
    fn owner_of(&self, producer_id: u64) -> Option<ProducerOwner> {
        if self.id_owners.is_empty() {
            return Some(ProducerOwner::ANONYMOUS);
        }
        self.id_owners.range(..=producer_id).next_back().map(|(_, owner)| *owner)
    }

    /// Returns whether some identity has an owner, so that checkpoints must list them.
    pub(super) fn has_producer_owners(&self) -> bool {
        let has_owner =
            |epochs: &IssuedEpochs| !epochs.owner.is_anonymous() || epochs.owned_since > 0;
        !self.id_owners.is_empty() || self.epochs.values().any(has_owner)
    }

    /// Restores the owners of ids from a checkpoint. Returns whether they are valid.
    pub(super) fn restore_id_owners(&mut self, firsts: &[u64], owners: &[Vec<u8>]) -> bool {
        let parsed: Option<Vec<_>> =
            owners.iter().map(|owner| ProducerOwner::from_field(owner)).collect();
        let Some(owners) = parsed.filter(|owners| owners.len() == firsts.len()) else {
            return false;
        };
        self.id_owners = firsts.iter().copied().zip(owners.iter().copied()).collect();
        firsts.is_sorted_by(|a, b| a < b)
            && owners.is_sorted_by(|a, b| a != b)
            && firsts.last().is_none_or(|last| *last < self.next_producer_id)
            && firsts.len() <= self.producers_max()
    }
}
