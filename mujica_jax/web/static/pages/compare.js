export const title = "compare";
export async function show(main) {}
