package upstream;

import java.util.Set;
import org.junit.jupiter.api.extension.ConditionEvaluationResult;
import org.junit.jupiter.api.extension.ExecutionCondition;
import org.junit.jupiter.api.extension.ExtensionContext;

/** Runs only the chosen invocations of a test, because one group protocol may be chosen without the other. */
public final class Chosen implements ExecutionCondition {
    static final String NOT_CHOSEN = "not chosen";
    static volatile Set<String> names = Set.of();

    @Override
    public ConditionEvaluationResult evaluateExecutionCondition(ExtensionContext context) {
        boolean invocation = context.getUniqueId().contains("test-template-invocation");
        if (!invocation || context.getTestMethod().isEmpty()) {
            return ConditionEvaluationResult.enabled("no invocation");
        }
        if (context.getDisplayName().contains(Main.TWIN)) {
            return ConditionEvaluationResult.disabled(NOT_CHOSEN);
        }
        String test = context.getRequiredTestClass().getSimpleName() + "." + context.getRequiredTestMethod().getName();
        return names.contains(Main.named(test, context.getDisplayName())) || names.contains(test)
                ? ConditionEvaluationResult.enabled("chosen")
                : ConditionEvaluationResult.disabled(NOT_CHOSEN);
    }
}
