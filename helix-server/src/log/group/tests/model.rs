//! Groups against a second, simple implementation, and with members that behave as clients do.

use super::*;

/// A second implementation: one row for each partition, searched from end to end.
#[derive(Default)]
struct SimpleGroup {
    epoch: u64,
    assignment_epoch: u64,
    /// Id, topics, joined, static name.
    members: Vec<(String, Vec<String>, u64, String)>,
    rows: BTreeMap<PartitionKey, SimpleRow>,
    /// Last committers and their epochs.
    commits: BTreeMap<PartitionKey, (String, u64)>,
}

#[derive(Default, Clone, Debug, PartialEq)]
struct SimpleRow {
    owner: Option<(String, u64)>,
    target: Option<String>,
    offset: Option<u64>,
}

impl SimpleGroup {
    fn member_epoch(&self, id: &str) -> Option<u64> {
        let (_, _, joined, _) = self.members.iter().find(|(other, ..)| other == id)?;
        Some(self.assignment_epoch.max(*joined))
    }

    fn apply(&mut self, index: u64, change: &GroupChange) -> bool {
        match change {
            GroupChange::PutMember { member, take_over, .. } => {
                let at = self.members.iter().position(|(id, ..)| *id == member.member_id);
                match at {
                    Some(at) if self.members[at].1 != member.topics => {
                        self.members[at].1.clone_from(&member.topics);
                        self.epoch = index;
                    }
                    Some(_) => {}
                    None => {
                        let mut is_same = false;
                        let name = &member.static_name;
                        let holder =
                            self.members.iter().position(|it| !name.is_empty() && it.3 == *name);
                        if let Some(at) = holder {
                            if !take_over {
                                return false;
                            }
                            let (replaced, topics, ..) = self.members.remove(at);
                            is_same =
                                self.assignment_epoch == self.epoch && topics == member.topics;
                            self.replace(index, &replaced, &member.member_id);
                        }
                        let id = member.member_id.clone();
                        self.members.push((id, member.topics.clone(), index, name.clone()));
                        self.members.sort();
                        self.epoch = index;
                        if is_same {
                            self.assignment_epoch = index;
                        }
                    }
                }
            }
            GroupChange::RemoveMembers { members } => {
                let before = self.members.len();
                self.members.retain(|(id, ..)| !members.contains(id));
                if self.members.len() < before {
                    self.epoch = index;
                    if self.members.is_empty() {
                        self.assignment_epoch = index;
                    }
                    for row in self.rows.values_mut() {
                        row.owner.take_if(|(id, _)| members.contains(id));
                        row.target.take_if(|id| members.contains(id));
                    }
                }
            }
            GroupChange::Assign(next) if next.group_epoch == self.epoch => {
                (self.epoch, self.assignment_epoch) = (index, index);
                self.rows.values_mut().for_each(|row| row.target = None);
                for (partition, owner) in next.partitions().filter(|(_, owner)| *owner > 0) {
                    let member = self.members[owner as usize - 1].0.clone();
                    self.rows.entry(partition).or_default().target = Some(member);
                }
            }
            GroupChange::Release { member_id, epoch, partitions }
                if self.member_epoch(member_id) == Some(*epoch) =>
            {
                for (_, row) in self.rows.iter_mut().filter(|(it, _)| partitions.contains(it)) {
                    if row.target.as_ref() != Some(member_id) {
                        row.owner.take_if(|(id, _)| id == member_id);
                    }
                }
            }
            GroupChange::Commit { member, offsets_epoch: None, topics, .. } => {
                let current = member.as_ref().and_then(|it| self.member_epoch(&it.member_id));
                let is_allowed = |partition: PartitionKey| match member {
                    None => self.members.is_empty(),
                    Some(it) => {
                        let owner = self.rows.get(&partition).and_then(|row| row.owner.as_ref());
                        let last = self.commits.get(&partition);
                        owner.is_some_and(|(id, since)| *id == it.member_id && *since <= it.epoch)
                            && current >= Some(it.epoch)
                            && last.is_none_or(|(id, at)| *id != it.member_id || *at <= it.epoch)
                    }
                };
                let updates = topics.iter().flat_map(TopicOffsets::updates);
                let updates: Vec<_> = updates.map(|(it, update)| (it, update.offset)).collect();
                if !updates.iter().all(|(partition, _)| is_allowed(*partition)) {
                    return false;
                }
                let by = member.as_ref().map(|it| (it.member_id.clone(), it.epoch));
                for (partition, offset) in updates {
                    self.commits.insert(partition, by.clone().unwrap_or_default());
                    self.rows.entry(partition).or_default().offset = offset;
                }
            }
            _ => {}
        }
        let epochs: BTreeMap<String, u64> = self
            .members
            .iter()
            .map(|(id, _, joined, _)| (id.clone(), self.assignment_epoch.max(*joined)))
            .collect();
        for row in self.rows.values_mut().filter(|row| row.owner.is_none()) {
            row.owner = row.target.clone().map(|id| (id.clone(), epochs[&id]));
        }
        true
    }

    /// Gives a member's target to another, and the partitions in it that the member owns.
    fn replace(&mut self, index: u64, replaced: &str, by: &str) {
        for row in self.rows.values_mut() {
            let is_target = row.target.as_deref() == Some(replaced);
            if row.owner.take_if(|(id, _)| id == replaced).is_some() && is_target {
                row.owner = Some((by.to_owned(), index));
            }
            if is_target {
                row.target = Some(by.to_owned());
            }
        }
    }

    fn agrees_with(&self, group: Option<&ConsumerGroup>) {
        let Some(group) = group else {
            assert!(self.members.is_empty() && self.rows.values().all(|row| row.offset.is_none()));
            return;
        };
        assert_eq!((self.epoch, self.assignment_epoch), (group.epoch, group.assignment_epoch));
        assert!(
            self.members
                .iter()
                .map(|(id, ..)| id.as_str())
                .eq(group.members.keys().map(|id| &**id))
        );
        let mut rows: BTreeMap<PartitionKey, SimpleRow> = BTreeMap::new();
        for (id, member) in group.members() {
            for (partition, since) in member.owned.iter() {
                let row = rows.entry(*partition).or_default();
                assert_eq!(row.owner.replace((id.to_string(), *since)), None, "two owners");
                assert_eq!(group.owner(*partition), Some(id));
            }
            for partition in member.target.iter() {
                let row = rows.entry(*partition).or_default();
                assert_eq!(row.target.replace(id.to_string()), None, "two targets");
            }
        }
        assert_eq!(group.owners().len(), rows.values().filter(|row| row.owner.is_some()).count());
        for (partition, row) in group.offsets() {
            rows.entry(partition).or_default().offset = row.offset();
        }
        let mine = self.rows.iter().filter(|(_, row)| **row != SimpleRow::default());
        assert!(mine.map(|(it, row)| (*it, row.clone())).eq(rows));
    }
}

/// A client as the protocol has it: it reads what it was given, stops, and then reports.
#[derive(Default, Clone)]
struct Client {
    static_name: String,
    takes_over: bool,
    epoch: u64,
    reading: BTreeSet<PartitionKey>,
    /// Requests that may arrive again, at any time.
    sent: Vec<MemberReport>,
}

struct Simulation {
    rng: StdRng,
    log: Log,
    model: SimpleGroup,
    topics: Vec<MatchedTopic>,
    clients: BTreeMap<String, Client>,
    next_client: u32,
}

impl Simulation {
    fn apply(&mut self, change: GroupChange) -> Result<(), GroupRefusal> {
        let (epoch, assigned) =
            self.log.state.groups().get(GROUP).map_or((0, 0), |it| (it.epoch, it.assignment_epoch));
        let applied = self.log.apply(change.clone());
        let accepted = self.model.apply(self.log.index, &change);
        assert_eq!(accepted, applied.is_ok(), "{change:?}: {applied:?}");
        let group = self.log.state.groups().get(GROUP);
        self.model.agrees_with(group);
        if let Some(group) = group {
            assert!(
                group.epoch >= epoch && group.assignment_epoch >= assigned,
                "epochs never fall"
            );
            assert!(!group.members.is_empty() || group.is_assigned(), "an empty group is quiet");
        } else {
            self.model = SimpleGroup::default();
        }
        applied
    }

    fn heartbeat(&mut self, report: &MemberReport) -> Result<MemberView, GroupRefusal> {
        let mut may_put = true;
        loop {
            match self.log.state.groups().judge(GROUP, report, may_put)? {
                ReportStep::Propose(change) => {
                    may_put &= !matches!(change, GroupChange::PutMember { .. });
                    self.apply(change)?;
                }
                ReportStep::Settled(view) => return Ok(view),
            }
        }
    }

    fn subscription(&mut self) -> Vec<String> {
        let all = [vec!["t*"], vec!["t1", "t2"], vec!["t2"], vec!["t*", "t3"]];
        all[self.rng.random_range(0..all.len())].iter().map(|it| (*it).to_owned()).collect()
    }

    /// Sends a client's next heartbeat; the response may be lost.
    fn beat(&mut self, id: &str, may_lose: bool) {
        let mut client = self.clients[id].clone();
        let mut spec = MemberSpec { member_id: id.to_owned(), ..MemberSpec::default() };
        if client.epoch == 0 || (may_lose && self.rng.random_bool(0.02)) {
            spec.topics = self.subscription();
        }
        if client.epoch == 0 {
            spec.static_name.clone_from(&client.static_name);
        }
        let report = MemberReport {
            spec,
            epoch: client.epoch,
            owned: client.reading.iter().copied().collect(),
            take_over: client.epoch == 0 && client.takes_over,
        };
        let answer = self.heartbeat(&report);
        client.sent.push(report);
        match answer {
            _ if may_lose && self.rng.random_bool(0.1) => {}
            Ok(view) => {
                client.epoch = view.epoch;
                client.reading = view.assigned.into_iter().collect();
            }
            Err(GroupRefusal::UnknownMember { .. } | GroupRefusal::StaleEpoch { .. }) => {
                client.epoch = 0;
                client.reading.clear();
            }
            Err(other) => panic!("{other}"),
        }
        self.clients.insert(id.to_owned(), client);
        self.check_readers();
    }

    /// No two members of the group read a partition. A client that was removed is another matter:
    /// it stops at its session timeout.
    fn check_readers(&self) {
        let Some(group) = self.log.state.groups().get(GROUP) else { return };
        let mut readers: BTreeMap<PartitionKey, &str> = BTreeMap::new();
        for (id, client) in &self.clients {
            let Some(member) = group.member(id) else { continue };
            if client.epoch < member.joined_epoch {
                continue;
            }
            for partition in &client.reading {
                assert_eq!(readers.insert(*partition, id), None, "two readers of {partition:?}");
                assert_eq!(group.owner(*partition).map(|owner| &**owner), Some(id.as_str()));
            }
        }
    }

    fn pick(&mut self) -> Option<String> {
        let ids: Vec<&String> = self.clients.keys().collect();
        if ids.is_empty() {
            return None;
        }
        Some(ids[self.rng.random_range(0..ids.len())].clone())
    }

    fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..8 if self.clients.len() < 6 => {
                self.next_client += 1;
                let static_name = format!("s{:03}", self.next_client);
                let client = Client { static_name, ..Client::default() };
                self.clients.insert(format!("m{:03}", self.next_client), client);
            }
            8..12 => {
                // A leave, or an expiry of a client that may live on.
                let Some(id) = self.pick() else { return };
                self.apply(GroupChange::RemoveMembers { members: vec![id.clone()] }).unwrap();
                if self.rng.random() {
                    self.clients.remove(&id);
                }
            }
            12..15 => {
                let at = self.rng.random_range(0..self.topics.len());
                self.topics[at].partition_count += self.rng.random_range(0..3);
            }
            15..16 if self.topics.len() > 1 => {
                let at = self.rng.random_range(0..self.topics.len());
                self.topics.remove(at);
            }
            16..18 if self.topics.len() < 4 => {
                let id = self.topics.last().map_or(1, |topic| topic.topic_id + 1);
                self.topics.push(topic(id, 2));
            }
            18..40 => self.assign(),
            40..48 => {
                // A copy of an earlier heartbeat arrives; its response reaches no client. A join of
                // a client that has left since makes a ghost, so it is left out.
                let Some(id) = self.pick() else { return };
                let sent = &self.clients[&id].sent;
                let Some(report) = sent.last().filter(|it| it.epoch != 0) else { return };
                let report =
                    sent.iter().rev().nth(self.rng.random_range(0..3)).unwrap_or(report).clone();
                if report.epoch != 0 && report.spec.topics.is_empty() {
                    drop(self.heartbeat(&report));
                    self.check_readers();
                }
            }
            48..60 => {
                let Some(id) = self.pick() else { return };
                let client = &self.clients[&id];
                let number = self.rng.random_range(0..4);
                let at = client.reading.iter().nth(number).copied().unwrap_or(key(1, 0));
                let epoch = client.epoch.saturating_sub(self.rng.random_range(0..3));
                let member = Some(CommittingMember { member_id: id, epoch, sequence: 0 });
                let member = member.filter(|_| self.rng.random_bool(0.9));
                let topics = offsets(&[(at, Some(self.log.index))]);
                drop(self.apply(GroupChange::Commit {
                    member,
                    offsets_epoch: None,
                    topics,
                    at_us: 0,
                }));
            }
            60..62 => self.log.restart().unwrap(),
            62..65 => {
                // Another process takes a client's name over.
                let Some(id) = self.pick() else { return };
                let replaced = self.clients.remove(&id).unwrap();
                self.next_client += 1;
                let static_name = replaced.static_name;
                let client = Client { static_name, takes_over: true, ..Client::default() };
                self.clients.insert(format!("m{:03}", self.next_client), client);
            }
            _ => {
                let Some(id) = self.pick() else { return };
                self.beat(&id, true);
            }
        }
    }

    fn matched(&self) -> Vec<MatchedTopic> {
        let Some(group) = self.log.state.groups().get(GROUP) else { return Vec::new() };
        let subscribed = group.subscriptions();
        let is_matched = |topic: &&MatchedTopic| {
            subscribed.iter().any(|text| pattern_matches(text, &topic.name))
        };
        self.topics.iter().filter(is_matched).cloned().collect()
    }

    fn assign(&mut self) {
        let topics = self.matched();
        let group = self.log.state.groups().get(GROUP);
        if let Some(next) = group.and_then(|it| it.next_assignment(&topics)) {
            self.apply(GroupChange::Assign(next)).unwrap();
            self.check_readers();
        }
    }

    /// Within six heartbeats of each member, every partition with a subscriber has its owner.
    fn settle(&mut self) {
        let members: Vec<String> = match self.log.state.groups().get(GROUP) {
            Some(group) => group.members.keys().map(|id| id.to_string()).collect(),
            None => return,
        };
        let gone = members.iter().filter(|id| !self.clients.contains_key(*id)).cloned().collect();
        self.apply(GroupChange::RemoveMembers { members: gone }).unwrap();
        let ids: Vec<String> = self.clients.keys().cloned().collect();
        for _ in 0..6 {
            self.assign();
            ids.iter().for_each(|id| self.beat(id, false));
        }
        let Some(group) = self.log.state.groups().get(GROUP) else { return };
        assert!(group.is_stable());
        for topic in self.matched() {
            for number in 0..topic.partition_count {
                let owner = group.owner(key(topic.topic_id, number)).expect("it has an owner");
                assert!(self.clients[&**owner].reading.contains(&key(topic.topic_id, number)));
            }
        }
        assert_eq!(group.next_assignment(&self.matched()), None, "a stable group is quiet");
    }
}

#[test]
fn groups_agree_with_a_simple_implementation_and_settle() {
    let mut rng = seeded("groups_agree_with_a_simple_implementation_and_settle");
    for _ in 0..60 {
        let rng: StdRng = rand::SeedableRng::seed_from_u64(rng.random());
        let mut simulation = Simulation {
            rng,
            log: Log::new(),
            model: SimpleGroup::default(),
            topics: vec![topic(1, 4), topic(2, 3)],
            clients: BTreeMap::new(),
            next_client: 0,
        };
        for step in 0..400 {
            simulation.step();
            if step % 100 == 99 {
                simulation.settle();
            }
        }
    }
}
