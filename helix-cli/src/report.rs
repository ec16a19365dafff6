//! Errors in three parts: what failed, with its reason; why it may be; what to try.
//! Only texts; which exit code goes with an error is decided in `exit`.

use std::fmt::Write;

use helix_client::{Error as ClientError, Origin};
use helix_proto::error::reason_name;
use helix_proto::log::v1::ErrorReason;
use tonic::Code;

use crate::exit::Failure;
use crate::reasons::{self, Text};
use crate::style::Style;

/// What the texts may refer to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scene {
    /// Address of the cluster.
    pub(crate) addr: String,
    /// Who named it; empty if nobody did.
    pub(crate) addr_source: String,
    /// Topic that the command is about.
    pub(crate) topic: Option<String>,
    /// The command is `helix cluster health`, which is no advice then.
    pub(crate) is_health: bool,
}

impl Scene {
    /// Who named the address, in brackets.
    fn source(&self) -> String {
        match self.addr_source.as_str() {
            "" => String::new(),
            source => format!(" ({source})"),
        }
    }
}

/// The text for standard error, with a newline at its end.
pub(crate) fn render(error: &anyhow::Error, scene: &Scene, style: Style) -> String {
    let parts = Parts::new(error, scene);
    let mut text = format!("{} {}\n", style.error("error:"), parts.what);
    for (label, part) in [("why", parts.why), ("try", parts.hint)] {
        if !part.is_empty() {
            let part = part.replace('\n', "\n       ");
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {} {part}", style.label(&format!("{label}:")));
        }
    }
    text
}

struct Parts {
    what: String,
    why: String,
    hint: String,
}

impl Parts {
    fn new(error: &anyhow::Error, scene: &Scene) -> Self {
        let mut contexts: Vec<String> = Vec::new();
        for cause in error.chain() {
            if let Some(failure) = cause.downcast_ref::<Failure>() {
                contexts.push(failure.what.clone());
                let (why, hint) = (failure.why.clone(), failure.hint.clone());
                return Self { what: contexts.join(": "), why, hint };
            }
            if let Some(error) = cause.downcast_ref::<ClientError>() {
                return Self::of_call(contexts, error, scene);
            }
            contexts.push(cause.to_string());
        }
        Self { what: contexts.join(": "), why: String::new(), hint: String::new() }
    }

    fn of_call(mut contexts: Vec<String>, error: &ClientError, scene: &Scene) -> Self {
        let (mut why, hint) = match error.reason {
            Some(reason) => of_reason(reason, error, scene),
            None => of_transport(error, scene),
        };
        let code = match error.reason {
            Some(reason) => reason_name(reason).to_owned(),
            None => screaming(error.code),
        };
        contexts.push(format!("{} ({code})", error.message));
        if error.may_have_applied {
            why += "\nit is not known whether the write was applied";
        }
        Self { what: contexts.join(": "), why: why.trim_start().to_owned(), hint }
    }
}

/// Failures that the service explains.
fn of_reason(reason: ErrorReason, error: &ClientError, scene: &Scene) -> (String, String) {
    use ErrorReason as R;
    let Text { why, hint, .. } = reasons::of(reason);
    // What this failure says beyond its reason.
    let why = match reason {
        R::TopicNotFound => format!("the cluster at {} has no topic of this name", scene.addr),
        R::OffsetOutOfRange => out_of_range(error, why),
        R::NotLeader => not_leader(error),
        R::Fenced => fenced(error, why),
        R::BatchTooLarge | R::RecordTooLarge => limit(error, why),
        _ => why.to_owned(),
    };
    let topic = scene.topic.as_deref().unwrap_or("TOPIC");
    let hint = hint.replace("TOPIC", topic);
    (why, format!("{hint}\nhelix explain {}", reason_name(reason)))
}

fn not_leader(error: &ClientError) -> String {
    let to = match &error.leader {
        Some(leader) if leader.node_id != 0 => {
            format!("node {} at {} leads it", leader.node_id, leader.endpoint)
        }
        _ => "it does not know who does".to_owned(),
    };
    format!("leadership moved while the command ran, and the node that was asked says: {to}")
}

fn out_of_range(error: &ClientError, why: &str) -> String {
    match &error.watermarks {
        Some(marks) => format!(
            "offsets {} up to (not including) {} can be read",
            marks.log_start_offset, marks.high_watermark
        ),
        None => why.to_owned(),
    }
}

fn fenced(error: &ClientError, why: &str) -> String {
    match error.fencing_token.as_deref() {
        Some("") => "no fencing token is in force".to_owned(),
        Some(token) => format!("the fencing token {token:?} is in force"),
        None => why.to_owned(),
    }
}

fn limit(error: &ClientError, why: &str) -> String {
    match error.limit {
        Some(limit) if error.origin == Origin::Client => {
            format!("no message with more than {limit} bytes of records is sent")
        }
        Some(limit) => format!("the topic allows {limit} bytes"),
        None => why.to_owned(),
    }
}

/// Failures that never reached the service, or that something on the way made up.
fn of_transport(error: &ClientError, scene: &Scene) -> (String, String) {
    let addr = &scene.addr;
    match (error.origin, error.code) {
        (Origin::Service, _) => {
            let Text { why, hint, .. } = reasons::of(ErrorReason::Unspecified);
            (why.to_owned(), hint.to_owned())
        }
        (_, Code::Unavailable | Code::DeadlineExceeded) => {
            let Text { hint, .. } = reasons::of_silence();
            let hint = match scene.is_health {
                // It has just asked every node.
                true => hint.split_once('\n').map_or(hint, |(_, others)| others),
                false => hint,
            };
            let why = "no Helix node answers in time at";
            let why = format!("{why} {addr}{}, or at the addresses that they gave", scene.source());
            (why, hint.to_owned())
        }
        (_, Code::Unimplemented | Code::Internal | Code::Unknown) => {
            let Text { hint, .. } = reasons::of_a_stranger();
            let why = "may not be a Helix node, or one of another version";
            (format!("what listens at {addr}{} {why}", scene.source()), hint.to_owned())
        }
        _ => (String::new(), String::new()),
    }
}

/// `NotFound` as gRPC writes it: `NOT_FOUND`.
pub(crate) fn screaming(code: Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_uppercase());
    }
    name
}

#[cfg(test)]
mod tests {
    use helix_proto::error as wire;
    use helix_proto::log::v1::{ErrorDetail, LeaderHint, Watermarks};
    use tonic::Status;

    use super::*;
    use crate::exit::Exit;

    fn scene() -> Scene {
        Scene {
            addr: "127.0.0.1:9092".to_owned(),
            addr_source: "context dev".to_owned(),
            topic: Some("orders".to_owned()),
            is_health: false,
        }
    }

    fn failed(detail: &ErrorDetail, message: &str) -> anyhow::Error {
        let error = ClientError::from(wire::to_status(detail, message, None));
        anyhow::Error::new(error).context("read orders")
    }

    #[test]
    fn a_refusal_has_three_parts() {
        let detail = ErrorDetail {
            watermarks: Some(Watermarks { log_start_offset: 5, high_watermark: 9 }),
            ..wire::detail(ErrorReason::OffsetOutOfRange)
        };
        let expected = "\
error: read orders: offset 12 is above the end (OFFSET_OUT_OF_RANGE)
  why: offsets 5 up to (not including) 9 can be read
  try: helix offsets orders
       helix consume orders --from earliest
       helix explain OFFSET_OUT_OF_RANGE
";
        assert_eq!(
            render(&failed(&detail, "offset 12 is above the end"), &scene(), Style::PLAIN),
            expected
        );
    }

    #[test]
    fn a_server_that_is_not_there_is_explained() {
        let error = ClientError::from(Status::unavailable("connection refused"));
        let text = render(&anyhow::Error::new(error), &scene(), Style::PLAIN);
        assert!(text.starts_with("error: connection refused (UNAVAILABLE)\n"), "{text}");
        let why = "no Helix node answers in time at 127.0.0.1:9092 (context dev)";
        assert!(text.contains(why), "{text}");
        assert!(text.contains("\n  try: helix cluster health"), "{text}");
        assert!(text.contains("\n       helix dev"), "{text}");
        let error = ClientError::from(Status::unavailable("connection refused"));
        let scene = Scene { is_health: true, ..scene() };
        let text = render(&anyhow::Error::new(error), &scene, Style::PLAIN);
        assert!(text.contains("\n  try: helix dev"), "{text}");
        assert!(!text.contains("cluster health"), "{text}");
    }

    #[test]
    fn a_leader_that_is_elsewhere_or_nowhere_is_explained() {
        let leader = LeaderHint { node_id: 3, endpoint: "n3:9092".to_owned(), term: 4 };
        let detail = ErrorDetail { leader: Some(leader), ..wire::detail(ErrorReason::NotLeader) };
        let text = render(&failed(&detail, "node 1 does not lead shard 2"), &scene(), Style::PLAIN);
        assert!(text.contains("(NOT_LEADER)"), "{text}");
        assert!(text.contains("node 3 at n3:9092 leads it"), "{text}");
        let text = render(
            &failed(&wire::detail(ErrorReason::NoLeader), "no leader"),
            &scene(),
            Style::PLAIN,
        );
        assert!(text.contains("a majority of the shard's replicas is down"), "{text}");
        assert!(text.contains("helix cluster health"), "{text}");
    }

    #[test]
    fn an_open_outcome_is_always_said() {
        let detail = wire::detail(ErrorReason::OutcomeUnknown);
        let text = render(&failed(&detail, "the leader is gone"), &scene(), Style::PLAIN);
        assert!(text.contains("it is not known whether the write was applied"), "{text}");
    }

    #[test]
    fn our_own_failures_keep_their_parts() {
        let failure = Failure::new(Exit::Error, "port 9092 is in use").hint("--port 9093");
        let text =
            render(&anyhow::Error::new(failure).context("start a node"), &scene(), Style::PLAIN);
        assert_eq!(text, "error: start a node: port 9092 is in use\n  try: --port 9093\n");
    }

    #[test]
    fn only_the_labels_are_coloured() {
        let error = anyhow::anyhow!("nothing helps");
        let text = render(&error, &scene(), Style { is_coloured: true });
        assert_eq!(text, "\x1b[1;31merror:\x1b[0m nothing helps\n");
    }

    #[test]
    fn codes_are_written_as_grpc_writes_them() {
        assert_eq!(screaming(Code::DeadlineExceeded), "DEADLINE_EXCEEDED");
        assert_eq!(screaming(Code::Ok), "OK");
    }
}
