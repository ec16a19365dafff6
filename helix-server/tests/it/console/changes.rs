//! Changes from the console's forms, and what they refuse.

use helix_proto::log::v1::GetTopicRequest;

use super::{Answer, Browser, commit, served};
use crate::support::TestServer;

/// Follows the redirect of a change.
async fn follow(browser: &Browser, answer: &Answer) -> Answer {
    assert_eq!(answer.status, 303, "{answer}");
    browser.get(answer.header("location").expect("a location")).await
}

/// Returns the value of a hidden field.
fn field(answer: &Answer, name: &str) -> String {
    let start = format!("name=\"{name}\" value=\"");
    let (_, rest) = answer.body.split_once(&start).unwrap_or_else(|| panic!("{name}: {answer}"));
    rest.split('"').next().unwrap_or_default().to_owned()
}

async fn partition_count(server: &TestServer, name: &str) -> usize {
    let request = GetTopicRequest { name: name.to_owned() };
    let found = server.topics().get_topic(request).await.unwrap().into_inner();
    found.topic.unwrap().partitions.len()
}

#[tokio::test]
async fn topics_are_created_altered_and_deleted() {
    let (server, browser) = served().await;
    let form = "name=orders&partitions=3&retention-time=7d&retention-bytes=&cleanup=";
    let created = browser.post("/console/topics", form).await;
    let page = follow(&browser, &created).await;
    page.expect(200, "The topic was created.").expect(200, "<strong class=\"now\">7d</strong>");
    let id = field(&page, "topic_id");
    let alter = format!("topic_id={id}&retention-time=12h&cleanup=compact&max-batch-bytes=");
    let altered = browser.post("/console/topics/orders/alter", &alter).await;
    let page = follow(&browser, &altered).await;
    page.expect(200, "The settings were changed.")
        .expect(200, "<strong class=\"now\">12h</strong>");
    page.expect(200, "<strong class=\"now\">compact</strong>");
    let add = format!("topic_id={id}&total=5");
    follow(&browser, &browser.post("/console/topics/orders/partitions", &add).await)
        .await
        .expect(200, "5 partitions");
    assert_eq!(partition_count(&server, "orders").await, 5);

    let delete = "/console/topics/orders/delete";
    let unconfirmed = browser.post(delete, &format!("topic_id={id}&confirm=order")).await;
    unconfirmed.expect(400, "type orders to confirm").expect(400, "helix topic delete orders");
    browser.post(delete, "topic_id=999&confirm=orders").await.expect(409, "TOPIC_RECREATED");
    assert_eq!(partition_count(&server, "orders").await, 5, "it is still there");
    let deleted = browser.post(delete, &format!("topic_id={id}&confirm=orders")).await;
    follow(&browser, &deleted).await.expect(200, "were deleted");
    browser.get("/console/topics/orders").await.expect(404, "TOPIC_NOT_FOUND");
}

#[tokio::test]
async fn wrong_values_of_forms_are_named_with_the_command() {
    let (_server, browser) = served().await;
    for (path, form, status, text) in [
        ("/console/topics", "name=a+b&partitions=1", 400, "INVALID_ARGUMENT"),
        ("/console/topics", "name=&partitions=1", 400, "INVALID_ARGUMENT"),
        ("/console/topics", "name=x&partitions=many", 400, "is not a number"),
        ("/console/topics", "name=x&partitions=200000", 400, "INVALID_ARGUMENT"),
        ("/console/topics", "name=x&retention-time=7", 400, "retention time: invalid duration"),
        ("/console/topics", "name=x&cleanup=burn", 400, "is not one of delete, compact"),
        ("/console/topics/default/alter", "retention-time=", 400, "at least one setting"),
        ("/console/topics/none/alter", "retention-time=7d", 404, "TOPIC_NOT_FOUND"),
        ("/console/topics/default/partitions", "total=2", 400, "helix topic add-partitions"),
        ("/console/groups/g/seek", "topic=none&to=earliest", 404, "helix group seek g none"),
        ("/console/groups/g/seek", "topic=default&to=then", 400, "invalid position"),
        ("/console/groups/g/seek", "topic=default&to=0&partitions=9", 400, "not a partition of"),
        ("/console/groups/none/undo", "", 404, "helix group seek none --undo"),
        ("/console/groups/none/delete", "confirm=none", 404, "helix group delete none"),
        ("/console/transfer", "shard=1&to=7", 404, "helix cluster transfer-leader --shard 1"),
        ("/console/transfer", "shard=x&to=1", 400, "is not a number"),
        ("/console/drain", "node=7&draining=yes", 404, "helix cluster drain 7"),
        ("/console/nothing", "", 404, "no such page"),
    ] {
        let answer = browser.post(path, form).await;
        assert!(answer.status == status && answer.body.contains(text), "{path} {form}: {answer}");
    }
}

#[tokio::test]
async fn a_seek_is_shown_before_it_is_made_and_can_be_taken_back() {
    let (server, browser) = served().await;
    server.append(&["a", "b", "c"]).await;
    commit(&server).await;
    let seek = "topic=default&to=latest&partitions=0";
    let shown = browser.post("/console/groups/readers/seek", seek).await;
    shown.expect(200, "Nothing is changed yet").expect(200, "default/0");
    shown.expect(200, "helix group seek readers default --to=latest -p 0");
    browser.get("/console/groups/readers").await.expect(200, "2 records");
    let confirmed = format!("{seek}&confirm=yes&epoch={}", field(&shown, "epoch"));
    let sought = browser.post("/console/groups/readers/seek", &confirmed).await;
    let page = follow(&browser, &sought).await;
    page.expect(200, "The offsets of the group were set.").expect(200, "console");
    // The same form again is older than the offsets.
    let late = browser.post("/console/groups/readers/seek", &confirmed).await;
    late.expect(409, "STALE_COMMIT");
    let shown = browser.post("/console/groups/readers/undo", "").await;
    shown.expect(200, "Take it back");
    let confirmed = format!("confirm=yes&epoch={}", field(&shown, "epoch"));
    let undone = browser.post("/console/groups/readers/undo", &confirmed).await;
    follow(&browser, &undone).await.expect(200, "taken back").expect(200, "2 records");
    let deleted = browser.post("/console/groups/readers/delete", "confirm=readers").await;
    follow(&browser, &deleted).await.expect(200, "The group and its offsets were deleted.");
}

#[tokio::test]
async fn a_notice_is_never_a_text_of_the_link() {
    let (_server, browser) = served().await;
    let page = browser.get("/console/?done=Your+session+ended").await;
    assert!(!page.body.contains("session ended") && !page.body.contains("class=\"notice\""));
}
