//! Tests of the members of a group.

use super::*;

const SESSION: Duration = Duration::from_secs(10);

struct Harness {
    group: KafkaGroup,
    now: Instant,
    ids: u32,
}

impl Harness {
    fn new() -> Self {
        let now = Instant::now();
        Self { group: KafkaGroup::new(now), now, ids: 0 }
    }

    fn spec(&mut self, member_id: &str) -> JoinSpec {
        self.ids += 1;
        JoinSpec {
            member_id: member_id.to_owned(),
            new_id: format!("m{}", self.ids),
            must_know_id: false,
            instance_id: None,
            client_id: "c".to_owned(),
            client_host: "h".to_owned(),
            session_timeout: SESSION,
            rebalance_timeout: Duration::from_secs(20),
            protocol_type: "consumer".to_owned(),
            protocols: vec![("range".to_owned(), Bytes::from_static(b"topics"))],
        }
    }

    fn join(&mut self, member_id: &str) -> oneshot::Receiver<JoinResult> {
        let spec = self.spec(member_id);
        match self.group.join(spec, self.now) {
            Reply::Later(joined) => joined,
            Reply::Now(reply) => panic!("{reply:?}"),
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.group.tick(self.now);
    }

    /// A stable group with the members m1 and m2.
    fn stable() -> Self {
        let mut harness = Self::new();
        let mut first = harness.join("");
        let mut second = harness.join("");
        harness.pass(FIRST_WAIT);
        assert_eq!(taken(&mut first).leader, "m1");
        assert_eq!(taken(&mut second).generation, 1);
        let assignments = vec![("m1".to_owned(), "a".into()), ("m2".to_owned(), "b".into())];
        let reply = harness.group.sync("m1", assignments, harness.now);
        assert!(matches!(reply, Reply::Now(Ok(assignment)) if assignment == "a"));
        let reply = harness.group.sync("m2", Vec::new(), harness.now);
        assert!(matches!(reply, Reply::Now(Ok(assignment)) if assignment == "b"));
        harness
    }
}

fn taken(receiver: &mut oneshot::Receiver<JoinResult>) -> Joined {
    receiver.try_recv().expect("a response").expect("the member has joined")
}

#[test]
fn leader_gets_members_and_followers_get_its_assignment() {
    let mut harness = Harness::new();
    let mut first = harness.join("");
    let mut second = harness.join("");
    assert!(first.try_recv().is_err(), "waits for further members");
    harness.pass(FIRST_WAIT);
    let (first, second) = (taken(&mut first), taken(&mut second));
    assert_eq!((first.members.len(), second.members.len()), (2, 0));
    assert_eq!((first.generation, second.generation), (1, 1));
    let Reply::Later(mut synced) = harness.group.sync("m2", Vec::new(), harness.now) else {
        panic!("a follower waits for the leader");
    };
    let assignments = vec![("m2".to_owned(), Bytes::from_static(b"p"))];
    harness.group.sync("m1", assignments, harness.now);
    assert_eq!(synced.try_recv().unwrap(), Ok(Bytes::from_static(b"p")));
    assert_eq!(harness.group.state, RebalanceState::Stable);
}

#[test]
fn new_member_makes_others_join_again() {
    let mut harness = Harness::stable();
    let mut third = harness.join("");
    assert_eq!(harness.group.heartbeat("m1", harness.now), Err(ResponseError::RebalanceInProgress));
    let mut first = harness.join("m1");
    assert!(third.try_recv().is_err());
    let mut second = harness.join("m2");
    assert_eq!(taken(&mut third).generation, 2);
    assert_eq!(taken(&mut first).members.len(), 3);
    assert_eq!(taken(&mut second).leader, "m1");
    // The old generation is fenced.
    let check = |generation| harness.group.check_member("m1", None, generation);
    assert_eq!(check(1), Err(ResponseError::IllegalGeneration));
    assert_eq!(check(2), Ok(()));
}

#[test]
fn silent_member_is_removed_and_a_round_ends_without_it() {
    let mut harness = Harness::stable();
    harness.pass(SESSION / 2);
    harness.group.heartbeat("m1", harness.now).unwrap();
    harness.pass(SESSION / 2);
    assert_eq!(harness.group.state, RebalanceState::Joining);
    assert!(!harness.group.members.contains_key("m2"));
    let mut first = harness.join("m1");
    assert_eq!(taken(&mut first).generation, 2);
    // A member that does not join again within the rebalance timeout is left out.
    let mut harness = Harness::stable();
    let mut third = harness.join("");
    for _ in 0..4 {
        harness.pass(Duration::from_secs(5));
        let _ = harness.group.heartbeat("m1", harness.now);
        let _ = harness.group.heartbeat("m2", harness.now);
    }
    assert_eq!(taken(&mut third).members.len(), 1);
}

#[test]
fn client_that_went_while_it_waited_does_not_hold_a_round() {
    let mut harness = Harness::stable();
    drop(harness.join(""));
    let mut first = harness.join("m1");
    let mut second = harness.join("m2");
    // Both got their responses with the gone member, which then expires.
    let _ = (taken(&mut first), taken(&mut second));
    harness.pass(Duration::from_secs(5));
    let _ = harness.group.heartbeat("m1", harness.now);
    let _ = harness.group.heartbeat("m2", harness.now);
    harness.pass(Duration::from_secs(60));
    assert!(!harness.group.members.contains_key("m3"));
}

#[test]
fn repeated_join_gets_the_same_generation() {
    let mut harness = Harness::stable();
    let spec = harness.spec("m2");
    let reply = harness.group.join(spec, harness.now);
    assert!(matches!(reply, Reply::Now(Ok(joined)) if joined.generation == 1));
    let spec = harness.spec("m1");
    let reply = harness.group.join(spec, harness.now);
    assert!(matches!(reply, Reply::Later(_)), "a leader asks for another assignment");
}

#[test]
fn new_member_learns_its_id_before_it_joins() {
    let mut harness = Harness::new();
    let spec = JoinSpec { must_know_id: true, ..harness.spec("") };
    let Reply::Now(Err((code, id))) = harness.group.join(spec, harness.now) else {
        panic!("the id is required");
    };
    assert_eq!(code, ResponseError::MemberIdRequired);
    let mut joined = harness.join(&id);
    harness.pass(FIRST_WAIT);
    assert_eq!(taken(&mut joined).member_id, id);
    let spec = harness.spec("stranger");
    let reply = harness.group.join(spec, harness.now);
    assert!(matches!(reply, Reply::Now(Err((ResponseError::UnknownMemberId, _)))));
}

#[test]
fn static_member_continues_without_a_round_and_fences_its_old_process() {
    let mut harness = Harness::new();
    let named = |spec: JoinSpec| JoinSpec { instance_id: Some("s".to_owned()), ..spec };
    let spec = named(harness.spec(""));
    let Reply::Later(mut joined) = harness.group.join(spec, harness.now) else { panic!() };
    harness.pass(FIRST_WAIT);
    assert_eq!(taken(&mut joined).member_id, "m1");
    harness.group.sync("m1", vec![("m1".to_owned(), "a".into())], harness.now);
    let spec = named(harness.spec(""));
    let Reply::Now(Ok(again)) = harness.group.join(spec, harness.now) else { panic!() };
    assert_eq!((again.generation, again.member_id.as_str()), (1, "m2"));
    assert_ne!(again.leader, "m2", "it must not compute another assignment");
    let reply = harness.group.sync("m2", Vec::new(), harness.now);
    assert!(matches!(reply, Reply::Now(Ok(assignment)) if assignment == "a"));
    let old = harness.group.check_member("m1", Some("s"), 1);
    assert_eq!(old, Err(ResponseError::FencedInstanceId));
}

#[test]
fn members_without_a_common_protocol_are_refused() {
    let mut harness = Harness::stable();
    let refused = |harness: &mut Harness, change: fn(&mut JoinSpec)| {
        let mut spec = harness.spec("");
        change(&mut spec);
        match harness.group.join(spec, harness.now) {
            Reply::Now(Err((code, _))) => code,
            reply => panic!("{reply:?}"),
        }
    };
    let other = refused(&mut harness, |spec| spec.protocols[0].0 = "sticky".to_owned());
    assert_eq!(other, ResponseError::InconsistentGroupProtocol);
    let kind = refused(&mut harness, |spec| spec.protocol_type = "connect".to_owned());
    assert_eq!(kind, ResponseError::InconsistentGroupProtocol);
    let none = refused(&mut harness, |spec| spec.protocols.clear());
    assert_eq!(none, ResponseError::InconsistentGroupProtocol);
    let short = refused(&mut harness, |spec| spec.session_timeout = Duration::ZERO);
    assert_eq!(short, ResponseError::InvalidSessionTimeout);
}

#[test]
fn last_member_that_leaves_empties_the_group() {
    let mut harness = Harness::stable();
    harness.group.leave("m1", None, harness.now).unwrap();
    assert_eq!(harness.group.state, RebalanceState::Joining);
    harness.group.leave("m2", None, harness.now).unwrap();
    assert_eq!(harness.group.state, RebalanceState::Empty);
    assert!(harness.group.is_unused());
    let gone = harness.group.leave("m2", None, harness.now);
    assert_eq!(gone, Err(ResponseError::UnknownMemberId));
}

#[test]
fn restart_fences_commits_of_the_generation() {
    let mut harness = Harness::stable();
    harness.group.restart(harness.now);
    let check = harness.group.check_member("m1", None, 1);
    assert_eq!(check, Err(ResponseError::IllegalGeneration));
    assert_eq!(harness.group.state, RebalanceState::Joining);
}
