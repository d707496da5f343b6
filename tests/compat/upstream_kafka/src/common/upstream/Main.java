package upstream;

import static org.junit.platform.engine.discovery.DiscoverySelectors.selectClass;
import static org.junit.platform.engine.discovery.DiscoverySelectors.selectMethod;

import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.junit.platform.engine.DiscoverySelector;
import org.junit.platform.engine.TestExecutionResult;
import org.junit.platform.engine.support.descriptor.MethodSource;
import org.junit.platform.launcher.Launcher;
import org.junit.platform.launcher.LauncherDiscoveryRequest;
import org.junit.platform.launcher.TestExecutionListener;
import org.junit.platform.launcher.TestIdentifier;
import org.junit.platform.launcher.TestPlan;
import org.junit.platform.launcher.core.LauncherDiscoveryRequestBuilder;
import org.junit.platform.launcher.core.LauncherFactory;

/**
 * Runs tests of the class path, and prints lines of JSON that say when a test starts and how it ended.
 *
 * <p>{@code list CLASS…} prints the names of all tests of the classes. {@code run FILE} runs the tests that the file
 * names. Each of its lines is {@code package.Class#method} and the names of the rows to run. All invocations of a test
 * are one row, except that each group protocol has a row of its own, {@code Class.method[consumer]}, and so have
 * transactions of version 2, {@code Class.method[consumer,tv2]}.
 */
public final class Main {
    static final String TWIN = "(the same cluster once more)";
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final String NEWER_TRANSACTIONS = "isTV2Enabled=true";
    private static final Pattern PROTOCOL = Pattern.compile("groupProtocol=(\\w+)");

    public static void main(String[] arguments) throws Exception {
        // Tests, and the tools that they run, also print to System.out. Only our answers may reach the real stream.
        PrintStream answers = System.out;
        System.setOut(new PrintStream(OutputStream.nullOutputStream()));
        LauncherDiscoveryRequestBuilder request = LauncherDiscoveryRequestBuilder.request()
                .configurationParameter("junit.jupiter.extensions.autodetection.enabled", "true")
                .configurationParameter(
                        "junit.jupiter.execution.timeout.testable.method.default",
                        System.getProperty("upstream.limit", "60") + " s")
                .configurationParameter("junit.jupiter.execution.timeout.lifecycle.method.default", "100 s");
        Launcher launcher = LauncherFactory.create();
        if (arguments[0].equals("list")) {
            for (String name : List.of(arguments).subList(1, arguments.length)) {
                request.selectors(selectClass(name));
            }
            Set<String> tests = new TreeSet<>();
            TestPlan plan = launcher.discover(request.build());
            plan.accept(new TestPlan.Visitor() {
                @Override
                public void visit(TestIdentifier test) {
                    if (test.getSource().orElse(null) instanceof MethodSource source) {
                        tests.add(source.getClassName() + "#" + source.getMethodName());
                    }
                }
            });
            tests.forEach(answers::println);
            return;
        }
        Set<String> chosen = new HashSet<>();
        for (String line : Files.readAllLines(Path.of(arguments[1]))) {
            String[] words = line.split(" ");
            chosen.addAll(List.of(words).subList(1, words.length));
            request.selectors(methods(words[0]));
        }
        Chosen.names = chosen;
        if (System.getenv("UPSTREAM_DOOR") != null) {
            Tests.bind();
        }
        LauncherDiscoveryRequest built = request.build();
        launcher.execute(built, new Rows(answers));
        answers.flush();
        // Halt, because clients of failed tests leave threads behind.
        Runtime.getRuntime().halt(0);
    }

    private static List<? extends DiscoverySelector> methods(String name) throws Exception {
        Class<?> owner = Class.forName(name.substring(0, name.indexOf('#')), false, Main.class.getClassLoader());
        String method = name.substring(name.indexOf('#') + 1);
        Set<String> found = new TreeSet<>();
        for (Class<?> at = owner; at != null; at = at.getSuperclass()) {
            for (var one : at.getDeclaredMethods()) {
                if (one.getName().equals(method) && !one.isSynthetic()) {
                    StringBuilder types = new StringBuilder();
                    for (Class<?> type : one.getParameterTypes()) {
                        types.append(types.isEmpty() ? "" : ", ").append(type.getName());
                    }
                    found.add(types.toString());
                }
            }
        }
        return found.stream().map(types -> selectMethod(owner, method, types)).toList();
    }

    /** Return the name of the row that an invocation belongs to. */
    static String named(String test, String displayName) {
        List<String> kinds = new ArrayList<>();
        Matcher protocol = PROTOCOL.matcher(displayName);
        if (protocol.find()) {
            kinds.add(protocol.group(1).toLowerCase());
        }
        if (displayName.contains(NEWER_TRANSACTIONS)) {
            kinds.add("tv2");
        }
        return kinds.isEmpty() ? test : test + "[" + String.join(",", kinds) + "]";
    }

    /** Adds up invocations and prints a row when its test has ended. */
    private static final class Rows implements TestExecutionListener {
        private record Row(int passed, int skipped, double seconds, String failure) {}

        private final PrintStream answers;
        private final Map<String, Long> started = new ConcurrentHashMap<>();
        private final Map<String, Map<String, Row>> rows = new ConcurrentHashMap<>();

        Rows(PrintStream answers) {
            this.answers = answers;
        }

        @Override
        public void executionStarted(TestIdentifier test) {
            started.put(test.getUniqueId(), System.nanoTime());
            String name = test.isTest() ? test(test) : null;
            if (name != null) {
                System.err.println("=== " + name + ": " + test.getDisplayName());
                say(Map.of("started", named(name, test.getDisplayName())));
            }
        }

        @Override
        public void executionSkipped(TestIdentifier test, String reason) {
            if (!reason.contains(Chosen.NOT_CHOSEN)) {
                add(test, new Row(0, 1, 0, reason));
                if (!test.getUniqueId().contains("test-template-invocation")) {
                    print(test);
                }
            }
        }

        @Override
        public void executionFinished(TestIdentifier test, TestExecutionResult result) {
            double seconds = (System.nanoTime() - started.getOrDefault(test.getUniqueId(), System.nanoTime())) / 1e9;
            Throwable failure = result.getThrowable().orElse(null);
            if (failure != null) {
                failure.printStackTrace();
            }
            String said = switch (result.getStatus()) {
                case SUCCESSFUL -> "";
                case ABORTED -> "aborted: " + failure;
                case FAILED -> failure == null ? "failed" : at(failure);
            };
            if (test.isTest()) {
                boolean passed = result.getStatus() == TestExecutionResult.Status.SUCCESSFUL;
                boolean aborted = result.getStatus() == TestExecutionResult.Status.ABORTED;
                add(test, new Row(passed ? 1 : 0, aborted ? 1 : 0, seconds, passed ? "" : said));
            } else if (failure != null && test.getSource().orElse(null) instanceof MethodSource) {
                add(test, new Row(0, 0, seconds, said));
            } else if (failure != null) {
                System.err.println("=== " + test.getDisplayName() + ": " + said);
            }
            if (!test.getUniqueId().contains("test-template-invocation")) {
                print(test);
            }
        }

        private static String at(Throwable failure) {
            StringBuilder said = new StringBuilder(String.valueOf(failure));
            for (StackTraceElement frame : failure.getStackTrace()) {
                String name = frame.getClassName();
                if (name.startsWith("kafka.") || (name.startsWith("org.apache.kafka") && name.contains("Test"))) {
                    said.append(" (").append(frame.getFileName()).append(':').append(frame.getLineNumber()).append(')');
                    break;
                }
            }
            return said.toString();
        }

        private static String test(TestIdentifier test) {
            if (!(test.getSource().orElse(null) instanceof MethodSource source)) {
                return null;
            }
            String name = source.getClassName();
            return name.substring(name.lastIndexOf('.') + 1) + "." + source.getMethodName();
        }

        private void add(TestIdentifier test, Row more) {
            String name = test(test);
            if (name != null) {
                rows.computeIfAbsent(name, key -> new LinkedHashMap<>())
                        .merge(named(name, test.getDisplayName()), more, (one, other) -> new Row(
                                one.passed + other.passed,
                                one.skipped + other.skipped,
                                one.seconds + other.seconds,
                                one.failure.isEmpty() ? other.failure : one.failure));
            }
        }

        private void print(TestIdentifier test) {
            String name = test(test);
            Map<String, Row> ended = name == null ? null : rows.remove(name);
            if (ended == null) {
                return;
            }
            ended.forEach((row, sum) -> {
                String outcome = sum.failure.isEmpty() ? "passed" : sum.passed + sum.skipped == sum.skipped
                        && sum.skipped > 0 ? "skipped" : "failed";
                Map<String, Object> answer = new LinkedHashMap<>();
                answer.put("test", row);
                answer.put("outcome", outcome);
                answer.put("seconds", sum.seconds);
                answer.put("detail", sum.failure);
                say(answer);
            });
        }

        private void say(Map<String, ?> line) {
            try {
                answers.write((JSON.writeValueAsString(line) + "\n").getBytes(StandardCharsets.UTF_8));
                answers.flush();
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    }
}
