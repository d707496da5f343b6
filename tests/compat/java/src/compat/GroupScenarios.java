package compat;

import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.kafka.common.TopicPartition;

/** Scenarios of groups whose members join, leave and change. The checker judges the delivery logs that they write. */
final class GroupScenarios {
    static final int PARTITIONS = 4;

    /** Shorter than the session timeout, so that only a LeaveGroup can cause a hand-over within this time. */
    static final double SOON_SECONDS = 4;

    /** Session timeout of leaving members. It is long, so that even on a slow machine no session expires first. */
    private static final int LONG_SESSION_MS = 45_000;

    /** The counterpart of SOON_SECONDS for LONG_SESSION_MS. */
    private static final double WELL_BEFORE_SECONDS = 30;

    private GroupScenarios() {}

    static void register(Map<String, Body> scenarios) {
        for (String assignor : List.of("range", "roundrobin", "sticky", "cooperative-sticky")) {
            boolean cooperative = assignor.equals("cooperative-sticky");
            scenarios.put("groups." + assignor + ".1-2-4", run -> oneTwoFour(run, cooperative, assignor));
        }
        scenarios.put("groups.default-list.1-2-4", run -> oneTwoFour(run, false));
        scenarios.put("groups.range.ten-runs", run -> tenRuns(run, false, "range"));
        scenarios.put("groups.cooperative-sticky.ten-runs", run -> tenRuns(run, true, "cooperative-sticky"));
        scenarios.put("groups.one-partition-three-consumers", GroupScenarios::onePartition);
        scenarios.put("groups.leave", run -> leave(run, WELL_BEFORE_SECONDS));
        scenarios.put("groups.commit-resume", run -> commitResume(run));
        scenarios.put("groups.commit-in-revoke", run -> commitInRevoke(run, "range", "cooperative-sticky"));
        scenarios.put("groups.static-members", GroupScenarios::staticMembers);
        scenarios.put("groups.partition-added", run -> partitionAdded(run));
        scenarios.put("groups.topic-deleted", run -> topicDeleted(run));
        scenarios.put("groups.regex", run -> regex(run));
        scenarios.put("groups.subscription-change", run -> subscriptionChange(run));
        scenarios.put("groups.same-client-id", GroupScenarios::sameClientId);
    }

    static void oneTwoFour(Run run, boolean cooperative, String... assignors) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        Set<TopicPartition> all = Clients.allOf(topic, PARTITIONS);
        View view = run.journal(topic, PARTITIONS, cooperative, false);
        Feed feed = run.feed(topic, PARTITIONS);
        List<Member> members = new ArrayList<>();
        for (int count : new int[] {1, 2, 4}) {
            while (members.size() < count) {
                String name = "c" + (members.size() + 1);
                members.add(run.start(new MemberOptions(name, group).topics(topic).assignors(assignors)));
            }
            view.waitSettled(names(members), all);
            view.waitQuiet();
        }
        // Close one member after the other. A Java consumer that closes during a rebalance reports its partitions as
        // lost, and does not commit.
        for (int left = members.size() - 1; left > 0; left--) {
            members.get(left).finish();
            view.waitSettled(names(members.subList(0, left)), all);
            view.waitQuiet();
        }
        view.waitMore(2 * PARTITIONS);
        feed.finish();
        view.waitCaughtUp();
        members.get(0).finish();
    }

    private static List<String> names(List<Member> members) {
        return members.stream().map(Thread::getName).toList();
    }

    static void finish(List<Member> members) throws InterruptedException {
        members.forEach(Member::requestStop);
        for (Member member : members) {
            member.finish();
        }
    }

    /** Run ten new groups one after the other. Each begins where the last one ended, and all write to one log. */
    private static void tenRuns(Run run, boolean cooperative, String assignor) throws Exception {
        String topic = run.topic(PARTITIONS);
        View view = run.journal(topic, PARTITIONS, cooperative, false);
        int rounds = 5;
        for (int attempt = 0; attempt < 10; attempt++) {
            String group = run.fresh("g");
            run.clients.commit(group, topic, PARTITIONS, attempt * 2L * rounds);
            List<Member> members = new ArrayList<>();
            for (int count : new int[] {1, 2, 4}) {
                while (members.size() < count) {
                    String name = "r" + attempt + "c" + (members.size() + 1);
                    members.add(run.start(new MemberOptions(name, group).topics(topic).assignors(assignor)));
                }
                view.waitSettled(names(members), Clients.allOf(topic, PARTITIONS));
                if (count > 1) {
                    run.produce(topic, PARTITIONS, rounds);
                }
            }
            view.waitCaughtUp();
            finish(members);
        }
    }

    private static void onePartition(Run run) throws Exception {
        String topic = run.topic(1);
        String group = run.fresh("g");
        View view = run.journal(topic, 1);
        List<Member> members = new ArrayList<>();
        for (String name : List.of("c1", "c2", "c3")) {
            members.add(run.start(new MemberOptions(name, group).topics(topic)));
        }
        view.waitFor(() -> view.owned.values().stream().anyMatch(owned -> !owned.isEmpty()), "the partition is owned");
        Check.eventually(
                () -> AdminScenarios.describeGroup(run.clients.admin(), group).members().size() == 3, "three members");
        for (int round = 0; round < 2; round++) {
            run.produce(topic, 1, 9);
            view.waitCaughtUp();
        }
        finish(members);
    }

    /** The remaining member owns all partitions well before the session of the closed member could expire. */
    static void leave(Run run, double withinSeconds, String... assignors) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        Set<TopicPartition> all = Clients.allOf(topic, PARTITIONS);
        View view = run.journal(topic, PARTITIONS);
        Feed feed = run.feed(topic, PARTITIONS);
        MemberOptions first = new MemberOptions("c1", group).session(LONG_SESSION_MS);
        MemberOptions second = new MemberOptions("c2", group).session(LONG_SESSION_MS);
        Member stays = run.start(first.topics(topic).assignors(assignors));
        Member goes = run.start(second.topics(topic).assignors(assignors));
        view.waitSettled(List.of("c1", "c2"), all);
        view.waitMore(2 * PARTITIONS);
        goes.finish();
        view.waitSettled(List.of("c1"), all, withinSeconds);
        view.waitMore(2 * PARTITIONS);
        feed.finish();
        view.waitCaughtUp();
        stays.finish();
    }

    static void commitResume(Run run, String... assignors) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        View view = run.journal(topic, PARTITIONS);
        for (String name : List.of("first", "second", "third")) {
            run.produce(topic, PARTITIONS, 5);
            Member member = run.start(new MemberOptions(name, group).topics(topic).assignors(assignors));
            view.waitCaughtUp();
            member.finish();
        }
        for (TopicPartition partition : Clients.allOf(topic, PARTITIONS)) {
            Check.equal(run.clients.committed(group, partition), 15L, "committed of " + partition);
        }
    }

    /** Only the revoke callback commits. So each hand-over after which no record is read twice proves one commit. */
    static void commitInRevoke(Run run, String... assignors) throws Exception {
        View view = null;
        for (String assignor : assignors) {
            String topic = run.topic(PARTITIONS);
            String group = run.fresh("g");
            Set<TopicPartition> all = Clients.allOf(topic, PARTITIONS);
            view = view == null ? run.journal(topic, PARTITIONS) : view;
            Feed feed = run.feed(topic, PARTITIONS);
            MemberOptions options = new MemberOptions(assignor + "-1", group).topics(topic).assignors(assignor);
            Member first = run.start(options.commit("revoke"));
            view.waitSettled(List.of(first.getName()), all);
            view.waitMore(5 * PARTITIONS);
            options = new MemberOptions(assignor + "-2", group).topics(topic).assignors(assignor);
            Member second = run.start(options.commit("revoke"));
            view.waitSettled(List.of(first.getName(), second.getName()), all);
            view.waitMore(5 * PARTITIONS);
            second.finish();
            view.waitSettled(List.of(first.getName()), all);
            view.waitMore(5 * PARTITIONS);
            feed.finish();
            view.waitCaughtUp();
            first.finish();
        }
    }

    /**
     * If a static member restarts within its session timeout, no partition moves, and the other member gets no new
     * assignment. A second member with the same group.instance.id fences the first.
     */
    private static void staticMembers(Run run) throws Exception {
        String topic = run.topic(PARTITIONS);
        Set<TopicPartition> all = Clients.allOf(topic, PARTITIONS);
        MemberOptions options = new MemberOptions("other", run.fresh("g")).topics(topic).commit("each");
        View view = run.journal(topic, PARTITIONS);
        Member other = run.start(options.instance("i-1", 20_000));
        Member mover = run.start(named(options, "mover").instance("i-2", 20_000));
        view.waitSettled(List.of("other", "mover"), all);
        run.produce(topic, PARTITIONS, 3);
        view.waitCaughtUp();
        Set<TopicPartition> held = new HashSet<>(view.owned.get("mover"));
        int rounds = view.assignments("other");
        mover.finish();
        mover = run.start(named(options, "mover-again").instance("i-2", 20_000));
        view.waitSettled(List.of("other", "mover-again"), all, 15);
        Check.equal(view.owned.get("mover-again"), held, "partitions after the restart");
        run.produce(topic, PARTITIONS, 3);
        view.waitCaughtUp();
        Check.equal(view.assignments("other"), rounds, "assignments of the other member after the restart");

        mover.expectFencing();
        // The member's ownership ends when the usurper joins, but the member learns that only from its next request.
        // So the log says here already that its ownership has ended.
        run.journal().killed("mover-again");
        Member usurper = run.start(named(options, "usurper").instance("i-2", 20_000));
        mover.waitFenced();
        mover.finish();
        view.waitSettled(List.of("other", "usurper"), all);
        run.produce(topic, PARTITIONS, 3);
        view.waitCaughtUp();
        finish(List.of(usurper, other));
    }

    private static MemberOptions named(MemberOptions options, String name) {
        return new MemberOptions(name, options.group())
                .topics(options.topics().toArray(String[]::new))
                .commit(options.commit());
    }

    static void partitionAdded(Run run, String... assignors) throws Exception {
        String topic = run.topic(2);
        String group = run.fresh("g");
        View view = run.journal(topic, 2);
        Feed feed = run.feed(topic, 2);
        List<Member> members = new ArrayList<>();
        for (String name : List.of("c1", "c2")) {
            members.add(run.start(new MemberOptions(name, group).topics(topic).assignors(assignors)));
        }
        view.waitSettled(List.of("c1", "c2"), Clients.allOf(topic, 2));
        run.clients.addPartitions(topic, 4);
        view.waitSettled(List.of("c1", "c2"), Clients.allOf(topic, 4));
        feed.finish();
        run.produce(topic, 4, 10);
        view.waitCaughtUp();
        finish(members);
    }

    /**
     * The members do not auto-commit. Before a client joins again, it would retry the auto-commit, also of the deleted
     * topic's offsets, until max.poll.interval.ms has passed.
     */
    static void topicDeleted(Run run, String... assignors) throws Exception {
        String stays = run.topic(2, "stays");
        String goes = run.topic(2, "goes");
        String group = run.fresh("g");
        Set<TopicPartition> both = new HashSet<>(Clients.allOf(stays, 2));
        both.addAll(Clients.allOf(goes, 2));
        View view = run.journal(stays, 2);
        List<Member> members = new ArrayList<>();
        for (String name : List.of("c1", "c2")) {
            members.add(run.start(new MemberOptions(name, group).topics(stays, goes).assignors(assignors).commit("each")));
        }
        view.waitSettled(List.of("c1", "c2"), both);
        run.produce(goes, 2, 5);
        run.produce(stays, 2, 5);
        view.waitCaughtUp();
        run.clients.deleteTopic(goes);
        view.waitSettled(List.of("c1", "c2"), Clients.allOf(stays, 2));
        run.produce(stays, 2, 5);
        view.waitCaughtUp();
        finish(members);
    }

    static void regex(Run run, String... assignors) throws Exception {
        String prefix = run.fresh("re");
        String first = run.topic(2, prefix + "-a");
        View view = run.journal(first, 2);
        MemberOptions options = new MemberOptions("c1", run.fresh("g")).pattern("^" + prefix + "-[ab]-.*");
        Member member = run.start(options.assignors(assignors));
        view.waitSettled(List.of("c1"), Clients.allOf(first, 2));
        run.topic(2, prefix + "-c");
        String second = run.topic(2, prefix + "-b");
        Set<TopicPartition> both = new HashSet<>(Clients.allOf(first, 2));
        both.addAll(Clients.allOf(second, 2));
        view.waitSettled(List.of("c1"), both);
        run.produce(first, 2, 5);
        run.produce(second, 2, 5);
        view.waitCaughtUp();
        member.finish();
    }

    static void subscriptionChange(Run run, String... assignors) throws Exception {
        String before = run.topic(2, "old");
        String after = run.topic(2, "new");
        String group = run.fresh("g");
        View view = run.journal(before, 2);
        Member steady = run.start(new MemberOptions("steady", group).topics(before).assignors(assignors));
        Member changing = run.start(new MemberOptions("changing", group).topics(before).assignors(assignors));
        view.waitSettled(List.of("steady", "changing"), Clients.allOf(before, 2));
        run.produce(before, 2, 5);
        view.waitCaughtUp();
        changing.changeTopics(after);
        view.waitFor(
                () -> Clients.allOf(before, 2).equals(view.owned.get("steady"))
                        && Clients.allOf(after, 2).equals(view.owned.get("changing")),
                "each has its topic");
        run.produce(before, 2, 5);
        run.produce(after, 2, 5);
        view.waitCaughtUp();
        changing.changeTopics(before, after);
        // Two partitions each are balanced already. So a coordinator that assigns partitions has no reason to move any.
        boolean atServer = List.of(assignors).equals(List.of(MemberOptions.SERVER_SIDE));
        view.waitFor(
                () -> view.owned.get("steady").size() + view.owned.get("changing").size() == 4
                        && (atServer || view.owned.get("steady").size() == 1)
                        && view.owned.get("changing").containsAll(Clients.allOf(after, 2)),
                "both topics are owned");
        run.produce(before, 2, 5);
        run.produce(after, 2, 5);
        view.waitCaughtUp();
        finish(List.of(changing, steady));
    }

    /** All members of this program share one client id. Here four of them start at the same moment. */
    private static void sameClientId(Run run) throws Exception {
        String topic = run.topic(PARTITIONS);
        String group = run.fresh("g");
        View view = run.journal(topic, PARTITIONS);
        List<Member> members = new ArrayList<>();
        for (String name : List.of("c1", "c2", "c3", "c4")) {
            members.add(run.start(new MemberOptions(name, group).topics(topic)));
        }
        view.waitSettled(names(members), Clients.allOf(topic, PARTITIONS));
        run.produce(topic, PARTITIONS, 10);
        view.waitCaughtUp();
        finish(members);
    }
}
