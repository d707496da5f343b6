package compat;

import java.io.IOException;
import java.io.InputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import sun.misc.Signal;

/**
 * The program of both Java suites. It runs scenarios and prints their results as JSON lines on stdout, or runs one
 * member of a group until SIGTERM, or measures joins ({@link Joins}).
 *
 * <p>The same sources are compiled once against each line of kafka-clients. The program does not judge delivery logs:
 * {@code tests/compat/checker.py} does.
 */
public final class Main {
    private static final long SCENARIO_SECONDS = 100;
    private static final int MAX_DETAIL = 600;

    private Main() {}

    public static void main(String[] arguments) throws Exception {
        System.setProperty("org.slf4j.simpleLogger.defaultLogLevel", environment("COMPAT_LOG_LEVEL", "warn"));
        System.setProperty("org.slf4j.simpleLogger.showDateTime", "true");
        System.setProperty("org.slf4j.simpleLogger.dateTimeFormat", "HH:mm:ss.SSS");
        if (Arrays.asList(arguments).contains("-version")) {
            System.out.println(libraryVersion());
            return;
        }
        String bootstrap = System.getenv("COMPAT_BOOTSTRAP");
        int status;
        try (Clients clients = new Clients(bootstrap)) {
            if (System.getenv("COMPAT_MEMBER_NAME") != null) {
                status = member(clients);
            } else if (System.getenv("COMPAT_JOINS") != null) {
                status = Joins.measure(clients, Integer.parseInt(System.getenv("COMPAT_JOINS")));
            } else {
                status = scenarios(clients);
            }
        }
        // Halt, because threads of a scenario that hung would keep the program alive.
        System.out.flush();
        Runtime.getRuntime().halt(status);
    }

    private static int scenarios(Clients clients) {
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        Map<String, Body> scenarios = new LinkedHashMap<>();
        DataScenarios.register(scenarios);
        TransactionScenarios.register(scenarios);
        AdminScenarios.register(scenarios);
        GroupScenarios.register(scenarios);
        CooperativeScenarios.register(scenarios);
        FailureScenarios.register(scenarios);
        EvictionScenarios.register(scenarios);
        RawScenarios.register(scenarios);
        ConsumerProtocolScenarios.register(scenarios);
        ShareScenarios.register(scenarios);
        String chosen = environment("COMPAT_SCENARIOS", "");
        List<String> named = chosen.isEmpty() ? List.of() : List.of(chosen.split(","));
        scenarios.forEach((name, body) -> {
            if (named.isEmpty() || named.contains(name)) {
                out.println(answer(name, body, clients));
            }
        });
        return 0;
    }

    /** Run one scenario on a thread of its own, with a deadline. */
    private static String answer(String name, Body body, Clients clients) {
        long started = System.nanoTime();
        String outcome = "passed";
        String detail = "";
        FutureTask<String> task = new FutureTask<>(() -> {
            try (Run run = new Run(name, clients)) {
                body.act(run);
                return run.detail;
            }
        });
        Thread thread = new Thread(task, name);
        thread.setDaemon(true);
        thread.start();
        try {
            detail = task.get(SCENARIO_SECONDS, TimeUnit.SECONDS);
        } catch (TimeoutException error) {
            outcome = "failed";
            StackTraceElement[] stack = thread.getStackTrace();
            detail = "did not end in " + SCENARIO_SECONDS + " s; at "
                    + Arrays.stream(stack).filter(frame -> frame.getClassName().startsWith("compat.")).findFirst()
                            .map(StackTraceElement::toString).orElse("?");
            thread.interrupt();
        } catch (ExecutionException error) {
            boolean skipped = error.getCause() instanceof Unsupported;
            outcome = skipped ? "skipped" : "failed";
            detail = skipped ? error.getCause().getMessage() : error.getCause().toString();
            if (!skipped) {
                error.getCause().printStackTrace();
            }
        } catch (InterruptedException error) {
            outcome = "failed";
            detail = error.toString();
        }
        double seconds = (System.nanoTime() - started) / 1e9;
        return String.format(
                Locale.ROOT,
                "{\"scenario\":\"%s\",\"outcome\":\"%s\",\"seconds\":%.2f,\"detail\":\"%s\"}",
                name,
                outcome,
                seconds,
                Journal.escaped(detail.substring(0, Math.min(detail.length(), MAX_DETAIL))));
    }

    /** Run one consumer until SIGTERM. Then the consumer closes cleanly. */
    private static int member(Clients clients) throws Exception {
        String commit = environment("COMPAT_COMMIT", "auto");
        String assignors = environment("COMPAT_ASSIGNOR", "");
        MemberOptions options = new MemberOptions(System.getenv("COMPAT_MEMBER_NAME"), System.getenv("COMPAT_GROUP"))
                .topics(System.getenv("COMPAT_TOPIC").split(","))
                .commit(commit);
        if (!assignors.isEmpty()) {
            options = options.assignors(assignors.split(","));
        }
        Failures failures = new Failures();
        try (Journal journal = new Journal(Path.of(System.getenv("COMPAT_DELIVERIES_FILE")))) {
            Member member = new Member(clients, options, journal, failures);
            Signal.handle(new Signal("TERM"), signal -> member.requestStop());
            member.start();
            member.join();
        }
        failures.all().forEach(System.err::println);
        return failures.all().isEmpty() ? 0 : 1;
    }

    private static String libraryVersion() throws IOException {
        Properties properties = new Properties();
        try (InputStream found = Main.class.getResourceAsStream("/kafka/kafka-version.properties")) {
            properties.load(found);
        }
        return properties.getProperty("version");
    }

    static String environment(String name, String otherwise) {
        String value = System.getenv(name);
        return value == null || value.isEmpty() ? otherwise : value;
    }
}
