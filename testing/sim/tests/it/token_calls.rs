//! Rules for calls with a token that expires.

use helix_sim::token_holder::{NodeView, ObservedCall, TokenOutcome};

const SECOND_US: u64 = 1_000_000;
const EXPIRES_US: u64 = 100 * SECOND_US;

/// Returns a call at this time, to a node that has compared this many of three clocks.
fn call(began_us: u64, compared: usize, outcome: TokenOutcome) -> ObservedCall {
    let before = NodeView { start_count: 1, members: 3, compared, refused: 4 };
    ObservedCall {
        began_us,
        ended_us: began_us + 1,
        views: Some((before, NodeView { refused: 5, ..before })),
        member_count: 3,
        expires_us: Some(EXPIRES_US),
        outcome,
    }
}

fn refused() -> TokenOutcome {
    TokenOutcome::Refused("token 1 expired 3 s ago".to_owned())
}

#[test]
fn a_node_is_judged_by_what_it_has_to_know() {
    let broken = |at_s: u64, compared, outcome| {
        call(at_s * SECOND_US, compared, outcome).broken_rule().is_some()
    };
    assert!(broken(80, 2, refused()), "valid");
    assert!(!broken(80, 0, refused()), "the node knows only its own clock");
    assert!(!broken(95, 3, refused()) && !broken(105, 3, TokenOutcome::Accepted), "close");
    assert!(broken(120, 3, TokenOutcome::Accepted), "expired");
    assert!(!broken(120, 2, TokenOutcome::Accepted), "the earlier of two clocks decides");
    assert!(!broken(120, 3, refused()) && !broken(80, 3, TokenOutcome::Accepted));
}

#[test]
fn a_refusal_has_a_reason_and_a_count() {
    let at_us = 120 * SECOND_US;
    let forever = ObservedCall { expires_us: None, ..call(at_us, 0, refused()) };
    assert!(forever.broken_rule().is_some_and(|rule| rule.contains("administrator")));
    let silent = call(at_us, 3, TokenOutcome::Refused("no".to_owned()));
    assert!(silent.broken_rule().is_some_and(|rule| rule.contains("without saying")));
    let good = call(at_us, 3, refused());
    let views = good.views.map(|(before, _)| (before, before));
    let uncounted = ObservedCall { views, ..call(at_us, 3, refused()) };
    assert!(uncounted.broken_rule().is_some_and(|rule| rule.contains("count")));
    assert_eq!(good.broken_rule(), None);
}
